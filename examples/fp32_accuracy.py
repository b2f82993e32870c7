"""How exact float32 is: errors against float64 of Sartor and of PyTorch, on easy data and on hard."""

import torch
import torch.nn.functional as F

import sartor
from sartor.testing import DATA, make_inputs, measure, reference, reference_gradients

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
N, D = 300, 64


def by_sartor(q, k, v, **options):
    return sartor.attention(q, k, v, layout="bhsd", causal=True, **options)


def by_pytorch(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


CALLS = {
    "Sartor, float32": by_sartor,
    "PyTorch, float32": by_pytorch,
    "Sartor, bfloat16": lambda q, k, v: by_sartor(q.bfloat16(), k.bfloat16(), v.bfloat16()).float(),
}
if device.type == "cuda":  # tensor cores that take 10 bits: for who asks for speed and not for float32's accuracy
    CALLS["Sartor, TF32"] = lambda q, k, v: by_sartor(q, k, v, precision="tf32")

print(f"{'relative error of':<20}{'data':<12}{'out':>10}{'dq':>10}{'dk':>10}{'dv':>10}")
for data in (
    "normal",
    "times8",
    "rising",
):  # as they come; scores 64 times as large, or rising along the keys
    made = make_inputs(1, 2, 2, N, N, D, D, torch.float32, device, layout="bhsd")
    q, k, v = (t.requires_grad_() for t in DATA[data](*made))
    dout = torch.randn_like(v)
    options = {"layout": "bhsd", "causal": True}
    exact = {"out": reference(q, k, v, **options)[0], **reference_gradients(q, k, v, dout, **options)}
    errors = {}
    for name, call in CALLS.items():
        out = call(q, k, v)
        found = dict(zip(("out", "dq", "dk", "dv"), (out, *torch.autograd.grad(out, (q, k, v), dout)), strict=True))
        errors[name] = [measure(found[n], exact[n]).rel for n in found]
        print(f"{name:<20}{data:<12}" + "".join(f"{e:>10.1e}" for e in errors[name]))
    assert max(errors["Sartor, float32"]) < 3 * max(errors["PyTorch, float32"])
