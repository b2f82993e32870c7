// The launches of one call, made by one call of C: what lists.py lays out, each parameter where the driver reads it.
// Every call has a frame of its own, on the stack: threads may replay one list at the same time.

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

// bytes, parameters of a launch, bytes, dims of a map: lists.py knows them
enum { FRAME = 16384, PARAMETERS = 128, MAP = 128, RANK = 5 };

typedef struct {  // CUlaunchAttribute of cuda.h
  unsigned id, unused, value[16];
} Attribute;

typedef struct {  // CUlaunchConfig of cuda.h
  unsigned grid[3], block[3], shared;
  void *stream;
  const Attribute *attributes;
  unsigned count;
} Config;

typedef int Launch(const Config *, void *function, void **parameters, void **extra);
typedef int Encode(void *map, unsigned dtype, unsigned rank, void *address, const uint64_t *sizes,
                   const uint64_t *strides, const unsigned *box, const unsigned *steps, unsigned interleave,
                   unsigned swizzle, unsigned promotion, unsigned beyond);

typedef struct {
  void *function;
  const unsigned *places;  // in the frame, where each parameter begins
  unsigned count, grid[3], block, shared;  // count: of parameters
  unsigned overlaps, unused;               // overlaps: it may begin before the launch before it has ended
} Step;

typedef struct {  // an address that each call writes
  unsigned place, source;  // source: of what it is given
} Address;

typedef struct {  // a tensor map that each call encodes
  uint64_t sizes[RANK], strides[RANK - 1];
  unsigned box[RANK], place, source, dtype, rank, interleave, swizzle, promotion, beyond, unused;
} Map;

typedef struct {  // what lists of one form share is elsewhere: places and addresses
  Launch *launch;
  Encode *encode;
  const Address *addresses;
  const Step *steps;
  const int64_t *offsets;  // of the first addresses, from what they are made of
  const Map *maps;
  const unsigned char *frame;  // with what is the same in every call
  unsigned address_count, step_count, offset_count, map_count, size, unused;
} List;

// 0, or what the driver said, and above its 16 bits the number of the launch it was said of; of a map, how many there are
int sartor_replay(const List *list, const uint64_t *given, void *stream) {
  static const unsigned one[RANK] = {1, 1, 1, 1, 1};  // from element to element, in each dim
  static const Attribute overlap = {6, 0, {1}};       // programmatic stream serialization
  _Alignas(64) unsigned char frame[FRAME], map[MAP];
  memcpy(frame, list->frame, list->size);
  for (unsigned i = 0; i < list->address_count; i++) {
    const Address *a = list->addresses + i;
    const uint64_t address = given[a->source] + (i < list->offset_count ? (uint64_t)list->offsets[i] : 0);
    memcpy(frame + a->place, &address, sizeof address);
  }
  for (unsigned i = 0; i < list->map_count; i++) {
    const Map *m = list->maps + i;
    const int status = list->encode(map, m->dtype, m->rank, (void *)(uintptr_t)given[m->source], m->sizes, m->strides,
                                    m->box, one, m->interleave, m->swizzle, m->promotion, m->beyond);
    if (status) return status | (int)(list->step_count << 16);
    memcpy(frame + m->place, map, MAP);
  }
  for (unsigned i = 0; i < list->step_count; i++) {
    const Step *s = list->steps + i;
    void *parameters[PARAMETERS];
    for (unsigned p = 0; p < s->count; p++) parameters[p] = frame + s->places[p];
    const Config config = {{s->grid[0], s->grid[1], s->grid[2]}, {s->block, 1, 1}, s->shared, stream,
                           s->overlaps ? &overlap : 0, s->overlaps};
    const int status = list->launch(&config, s->function, parameters, 0);
    if (status) return status | (int)(i << 16);
  }
  return 0;
}

// ---- Calls with PyTorch's node behind them, without Python: kernels of the node's operator and of its backward, by the C
// interface that torch gives extensions. They make what was made once, for tensors that lie in the same way; what they do
// not know, Python's kernels do.

enum { TENSORS = 6, MADE = 4, VALUES = 11, DIMS = 4, MARK = 0x5a };  // lists of calls: calls.py knows them

typedef void **Tensor;  // AtenTensorHandle: the address of an at::Tensor, which is one pointer

typedef struct {  // std::optional<at::Tensor>
  void *value;
  bool is;
} OptionalTensor;

typedef struct {  // std::optional<double>
  double value;
  bool is;
} OptionalNumber;

typedef struct {  // std::tuple of at::Tensor, whose last one comes first. Of two, too: it comes back in memory, as this
  void *last[3];  // does, which is too large for registers
} Tuple;

typedef struct {  // of torch and the driver, as calls.py finds them
  bool (*grad_mode)(void);
  int (*dim)(Tensor, int64_t *);
  int (*sizes)(Tensor, int64_t **);
  int (*strides)(Tensor, int64_t **);
  int (*dtype)(Tensor, int32_t *);
  int (*device)(Tensor, int32_t *);
  int (*address)(Tensor, void **);
  int (*empty)(int64_t dim, const int64_t *sizes, const int64_t *strides, int32_t dtype, int32_t device_type,
               int32_t device, Tensor *);
  int (*drop)(Tensor);
  int (*stream)(int32_t device, void **);
  void *(*settings)(void);
  bool (*deterministic)(const void *settings);
  int (*context)(void **);
  int (*capturing)(void *stream, int *);
  void *(*allocate)(size_t);
  void (*release)(void *);
  Tuple (*forward)(uint64_t keys, Tensor, Tensor, Tensor, double, bool, const OptionalTensor *, OptionalNumber);
  Tuple (*backward)(uint64_t keys, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, double, bool, const OptionalTensor *,
                    OptionalNumber);
  uint64_t forward_keys, backward_keys;  // of the dispatcher, under which Python's kernels are
} Torch;

typedef struct {
  int64_t dim, sizes[DIMS], strides[DIMS];
  int32_t dtype, device;
} Layout;

typedef struct Call Call;
struct Call {  // what was made once
  const Call *next;
  const List *list;
  void *context;
  void *stream, *kept;  // a workspace that calls on this stream share, or null
  Layout given[TENSORS], made[MADE];
  int32_t given_at[TENSORS], made_at[MADE], kept_at;  // among the values of the list
  int32_t given_count, made_count, returned;  // of what is made, the last ones are not
  int32_t device_type, deterministic;
};

typedef struct {
  const Call *forward, *backward;
} Calls;

static Torch torch;

void sartor_torch(const Torch *found) { torch = *found; }

// The calls that a mask of shape (0, MARK, address) stands for.
static const Calls *calls_of(Tensor mask) {
  static const Calls none;
  int64_t dim, *sizes;
  if (!mask || torch.dim(mask, &dim) || dim != 3 || torch.sizes(mask, &sizes)) return &none;
  return sizes[0] == 0 && sizes[1] == MARK ? (const Calls *)(uintptr_t)sizes[2] : &none;
}

// Found before those that are there, by any thread from now on.
void sartor_add(const Call **first, Call *call) {
  call->next = *first;
  __atomic_store_n(first, call, __ATOMIC_RELEASE);
}

static bool lies(Tensor t, const Layout *as) {
  int64_t dim, *sizes, *strides;
  int32_t dtype, device;
  if (torch.dim(t, &dim) || dim != as->dim || torch.dtype(t, &dtype) || dtype != as->dtype) return false;
  if (torch.device(t, &device) || device != as->device) return false;
  if (torch.sizes(t, &sizes) || torch.strides(t, &strides)) return false;
  const size_t size = (size_t)dim * sizeof *sizes;
  return !memcmp(sizes, as->sizes, size) && !memcmp(strides, as->strides, size);
}

// Whether it was made, and what is returned, as the dispatcher takes it.
static bool made(const Call *c, const Tensor *given, uint64_t *results) {
  uint64_t at[VALUES] = {0};
  void *context, *stream, *address;
  if (torch.context(&context) || context != c->context) return false;
  if (torch.deterministic(torch.settings()) != c->deterministic) return false;
  for (int i = 0; i < c->given_count; i++) {
    if (!lies(given[i], c->given + i) || torch.address(given[i], &address)) return false;
    at[c->given_at[i]] = (uint64_t)(uintptr_t)address;
    if (!address || ((uintptr_t)address & 15)) return false;
  }
  if (torch.stream(c->given[0].device, &stream)) return false;
  if (c->kept) {  // a graph has one of its own
    int capturing = 0;
    if (stream != c->stream || (stream && (torch.capturing(stream, &capturing) || capturing))) return false;
    at[c->kept_at] = (uint64_t)(uintptr_t)c->kept;
  }
  Tensor found[MADE];
  int count = 0;
  bool fine = true;
  while (fine && count < c->made_count) {
    const Layout *m = c->made + count;
    if (torch.empty(m->dim, m->sizes, m->strides, m->dtype, c->device_type, m->device, found + count)) break;
    fine = !torch.address(found[count], &address) && address;
    at[c->made_at[count++]] = (uint64_t)(uintptr_t)address;
  }
  fine = fine && count == c->made_count && !sartor_replay(c->list, at, stream);
  for (int i = 0; i < count; i++) {
    if (fine && i < c->returned) results[i] = (uint64_t)(uintptr_t)found[i];
    else torch.drop(found[i]);  // of a workspace: to its stream, after the launches
  }
  return fine;
}

typedef struct {  // of a call by the dispatcher: what it gives belongs to who is called
  Tensor tensors[TENSORS], mask;
  uint64_t *boxes[2];  // of the mask and of the scale
  OptionalTensor optional;
  OptionalNumber scale;
  double dropout;
  bool causal;
} Given;

static void drop(Given *x) {
  for (int i = 0; i < TENSORS && x->tensors[i]; i++) torch.drop(x->tensors[i]);
  if (x->mask) torch.drop(x->mask);
  for (int i = 0; i < 2; i++)
    if (x->boxes[i]) torch.release(x->boxes[i]);
}

// Tensors, dropout_p, is_causal, attn_mask?, scale?
static Given taken(const uint64_t *stack, int tensors) {
  Given x = {0};
  for (int i = 0; i < tensors; i++) x.tensors[i] = (Tensor)(uintptr_t)stack[i];
  memcpy(&x.dropout, stack + tensors, sizeof x.dropout);
  x.causal = (stack[tensors + 1] & 255) != 0;
  for (int i = 0; i < 2; i++) x.boxes[i] = (uint64_t *)(uintptr_t)stack[tensors + 2 + i];
  if (x.boxes[0]) x.mask = (Tensor)(uintptr_t)*x.boxes[0];
  if (x.mask) x.optional = (OptionalTensor){*x.mask, true};
  if ((x.scale.is = x.boxes[1] != 0)) memcpy(&x.scale.value, x.boxes[1], sizeof x.scale.value);
  return x;
}

static bool known(const Call *const *first, const Given *x, uint64_t *stack) {
  const Call *c = __atomic_load_n(first, __ATOMIC_ACQUIRE);
  while (c && !made(c, x->tensors, stack)) c = c->next;
  return c;
}

static void give(uint64_t *stack, void *const *last, int count) {
  for (int i = 0; i < count; i++) {
    Tensor one = torch.allocate(sizeof *one);
    *one = last[count - 1 - i];
    stack[i] = (uint64_t)(uintptr_t)one;
  }
}

// The operator: q, k, v.
void sartor_forward(uint64_t *stack, uint64_t arguments, uint64_t results) {
  (void)arguments, (void)results;
  __attribute__((cleanup(drop))) Given x = taken(stack, 3);
  if (known(&calls_of(x.mask)->forward, &x, stack)) return;
  const Tensor *t = x.tensors;
  Tuple found = torch.forward(torch.forward_keys, t[0], t[1], t[2], x.dropout, x.causal, &x.optional, x.scale);
  give(stack, found.last, 2);
}

// Its backward: dout, q, k, v, out, lse. Gradients that are to have some are Python's.
void sartor_backward(uint64_t *stack, uint64_t arguments, uint64_t results) {
  (void)arguments, (void)results;
  __attribute__((cleanup(drop))) Given x = taken(stack, 6);
  if (!torch.grad_mode() && known(&calls_of(x.mask)->backward, &x, stack)) return;
  const Tensor *t = x.tensors;
  Tuple found = torch.backward(torch.backward_keys, t[0], t[1], t[2], t[3], t[4], t[5], x.dropout, x.causal, &x.optional,
                               x.scale);
  give(stack, found.last, 3);
}
