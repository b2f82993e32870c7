// The launches of one call, made by one call of C: what lists.py lays out, each parameter where the driver reads it.
// Every call has a frame of its own, on the stack: threads may replay one list at the same time.

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

enum { FRAME = 16384, PARAMETERS = 128, MAP = 128 };  // bytes, parameters of a launch, bytes: lists.py knows them

typedef struct {  // CUlaunchConfig of cuda.h, without attributes
  unsigned grid[3], block[3], shared;
  void *stream, *attributes;
  unsigned count;
} Config;

typedef int Launch(const Config *, void *function, void **parameters, void **extra);
typedef int Encode(void *map, unsigned dtype, unsigned rank, void *address, const uint64_t *sizes,
                   const uint64_t *strides, const unsigned *box, const unsigned *steps, unsigned interleave,
                   unsigned swizzle, unsigned promotion, unsigned beyond);

typedef struct {
  void *function;
  unsigned grid[3], block, shared, count;  // count: of parameters
  const unsigned *places;  // in the frame, where each begins
} Step;

typedef struct {  // an address that each call writes
  unsigned place, source;  // source: of what it is given
  int64_t offset;
} Address;

typedef struct {  // a tensor map that each call encodes
  unsigned place, source, dtype, rank;
  const uint64_t *sizes, *strides;
  const unsigned *box, *steps;
  unsigned interleave, swizzle, promotion, beyond;
} Map;

typedef struct {
  Launch *launch;
  Encode *encode;
  const Step *steps;
  const Address *addresses;
  const Map *maps;
  const unsigned char *frame;  // with what is the same in every call
  unsigned size, step_count, address_count, map_count;
} List;

// 0, or what the driver said, and above its 16 bits the number of the launch it was said of; of a map, how many there are
int sartor_replay(const List *list, const uint64_t *given, void *stream) {
  _Alignas(64) unsigned char frame[FRAME], map[MAP];
  memcpy(frame, list->frame, list->size);
  for (unsigned i = 0; i < list->address_count; i++) {
    const Address *a = list->addresses + i;
    const uint64_t address = given[a->source] + (uint64_t)a->offset;
    memcpy(frame + a->place, &address, sizeof address);
  }
  for (unsigned i = 0; i < list->map_count; i++) {
    const Map *m = list->maps + i;
    const int status = list->encode(map, m->dtype, m->rank, (void *)(uintptr_t)given[m->source], m->sizes, m->strides,
                                    m->box, m->steps, m->interleave, m->swizzle, m->promotion, m->beyond);
    if (status) return status | (int)(list->step_count << 16);
    memcpy(frame + m->place, map, MAP);
  }
  for (unsigned i = 0; i < list->step_count; i++) {
    const Step *s = list->steps + i;
    void *parameters[PARAMETERS];
    for (unsigned p = 0; p < s->count; p++) parameters[p] = frame + s->places[p];
    const Config config = {{s->grid[0], s->grid[1], s->grid[2]}, {s->block, 1, 1}, s->shared, stream, 0, 0};
    const int status = list->launch(&config, s->function, parameters, 0);
    if (status) return status | (int)(i << 16);
  }
  return 0;
}

// ---- The backward of calls with PyTorch's node behind them, without Python: a kernel of the node's operator, by the C
// interface that torch gives extensions. What it does not know, Python's kernel of the operator does.

enum { GIVEN = 6, GRADIENTS = 3, DIMS = 4, MARK = 0x5a };

typedef void **Tensor;  // AtenTensorHandle: the address of an at::Tensor, which is one pointer

typedef struct {  // std::optional<at::Tensor>
  void *value;
  bool is;
} OptionalTensor;

typedef struct {  // std::optional<double>
  double value;
  bool is;
} OptionalNumber;

typedef struct {  // std::tuple of three at::Tensor, whose last one comes first
  void *last[GRADIENTS];
} Three;

typedef struct {  // of torch and the driver, as library.py finds them
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
  void *(*allocate)(size_t);
  void (*release)(void *);
  Three (*python)(uint64_t keys, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, double, bool, const OptionalTensor *,
                  OptionalNumber);
  uint64_t keys;  // of the dispatcher, under which Python's kernel is
} Torch;

typedef struct {
  int64_t dim, sizes[DIMS], strides[DIMS];
  int32_t dtype, device;
} Layout;

typedef struct Call Call;
struct Call {  // a backward that was made once
  const Call *next;
  const List *list;
  void *context;
  Layout given[GIVEN], made[GRADIENTS + 1];  // dout, q, k, v, out, lse; dq, dk, dv and the workspace
  int32_t device_type, deterministic;
};

typedef struct {
  const Call *first;
} Calls;

static Torch torch;

void sartor_torch(const Torch *found) { torch = *found; }

// The calls that a mask of shape (0, MARK, address) stands for.
static const Call *calls_of(Tensor mask) {
  int64_t dim, *sizes;
  if (!mask || torch.dim(mask, &dim) || dim != 3 || torch.sizes(mask, &sizes)) return 0;
  if (sizes[0] != 0 || sizes[1] != MARK) return 0;
  return __atomic_load_n(&((const Calls *)(uintptr_t)sizes[2])->first, __ATOMIC_ACQUIRE);
}

// Found before those that are there, by any thread from now on.
void sartor_add(Calls *calls, Call *call) {
  call->next = calls->first;
  __atomic_store_n(&calls->first, call, __ATOMIC_RELEASE);
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

// Whether the gradients were made.
static bool made(const Call *c, const Tensor *given, Tensor *gradients) {
  uint64_t at[GIVEN + 1 + GRADIENTS + 1] = {0};  // q, k, v, dout, out, lse, no dlse, dq, dk, dv, workspace
  static const int places[GIVEN] = {3, 0, 1, 2, 4, 5};
  void *context, *stream, *address;
  if (torch.context(&context) || context != c->context) return false;
  if (torch.deterministic(torch.settings()) != c->deterministic) return false;
  for (int i = 0; i < GIVEN; i++) {
    if (!lies(given[i], c->given + i) || torch.address(given[i], &address)) return false;
    at[places[i]] = (uint64_t)(uintptr_t)address;
    if (!address || ((uintptr_t)address & 15)) return false;
  }
  if (torch.stream(c->given[0].device, &stream)) return false;
  Tensor found[GRADIENTS + 1];
  int count = 0;
  bool fine = true;
  while (fine && count <= GRADIENTS) {
    const Layout *m = c->made + count;
    if (torch.empty(m->dim, m->sizes, m->strides, m->dtype, c->device_type, m->device, found + count)) break;
    fine = !torch.address(found[count], &address) && address;
    at[GIVEN + 1 + count++] = (uint64_t)(uintptr_t)address;
  }
  fine = fine && count > GRADIENTS && !sartor_replay(c->list, at, stream);
  for (int i = fine ? GRADIENTS : 0; i < count; i++) torch.drop(found[i]);  // as its stream has it, after the launches
  if (fine) memcpy(gradients, found, GRADIENTS * sizeof *gradients);
  return fine;
}

typedef struct {  // of a call by the dispatcher: what it gives belongs to who is called
  Tensor tensors[GIVEN], mask;
  uint64_t *boxes[2];
} Owned;

static void drop(Owned *x) {
  for (int i = 0; i < GIVEN; i++) torch.drop(x->tensors[i]);
  if (x->mask) torch.drop(x->mask);
  for (int i = 0; i < 2; i++)
    if (x->boxes[i]) torch.release(x->boxes[i]);
}

// The operator's backward: dout, q, k, v, out, lse, dropout_p, is_causal, attn_mask?, scale?.
void sartor_backward(uint64_t *stack, uint64_t arguments, uint64_t results) {
  (void)arguments, (void)results;
  __attribute__((cleanup(drop))) Owned x = {{0}, 0, {(uint64_t *)(uintptr_t)stack[8], (uint64_t *)(uintptr_t)stack[9]}};
  for (int i = 0; i < GIVEN; i++) x.tensors[i] = (Tensor)(uintptr_t)stack[i];
  if (x.boxes[0]) x.mask = (Tensor)(uintptr_t)*x.boxes[0];
  Tensor gradients[GRADIENTS];
  if (!torch.grad_mode()) {
    for (const Call *c = calls_of(x.mask); c; c = c->next) {
      if (made(c, x.tensors, gradients)) {
        for (int i = 0; i < GRADIENTS; i++) stack[i] = (uint64_t)(uintptr_t)gradients[i];
        return;
      }
    }
  }
  OptionalTensor mask = {x.mask ? *x.mask : 0, x.mask != 0};
  OptionalNumber scale = {0, x.boxes[1] != 0};
  double dropout;
  if (scale.is) memcpy(&scale.value, x.boxes[1], sizeof scale.value);
  memcpy(&dropout, stack + 6, sizeof dropout);
  const Tensor *t = x.tensors;
  Three found = torch.python(torch.keys, t[0], t[1], t[2], t[3], t[4], t[5], dropout, (stack[7] & 255) != 0, &mask, scale);
  for (int i = 0; i < GRADIENTS; i++) {
    Tensor one = torch.allocate(sizeof *one);
    *one = found.last[GRADIENTS - 1 - i];
    stack[i] = (uint64_t)(uintptr_t)one;
  }
}
