"""What the model of `sartor.distributed.choose` says of many GPUs, from the steps that were measured on one: how near the
model is to those steps, how long a pass takes, and up to how many GPUs a method pays."""

from __future__ import annotations

LENGTHS = {1 << 17: "128k", 1 << 20: "1M", 1 << 24: "16M"}
GPUS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
TABLED = (8, 32, 64, 128, 256, 1024)  # of them in the table
METHODS = {"ring": "#D55E00", "allgather": "#0072B2", "ulysses": "#009E73", "usp": "#332288"}
PAYS = 0.5  # of each GPU's time is put to use
