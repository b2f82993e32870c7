// The launches of one call, made by one call of C: what lists.py lays out, each parameter where the driver reads it.
// Every call has a frame of its own, on the stack: threads may replay one list at the same time.

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
