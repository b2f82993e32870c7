// A driver that launches nothing and writes down what it is told, byte by byte. A function's handle is the address of
// its parameters' sizes: how many, and bytes of each.

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
  unsigned id, unused, value[16];
} Attribute;

typedef struct {
  unsigned shape[7];
  void *stream;
  const Attribute *attributes;
  unsigned count;
} Config;

static unsigned char told[1 << 20];
static size_t length;
static int quiet, refusals, refusal;
int stub_capturing, stub_version;
uint64_t stub_capture;
void *stub_stream, *stub_context = (void *)1;  // torch's current ones

static void note(const void *from, size_t size) {
  if (size > sizeof told - length) abort();
  memcpy(told + length, from, size);
  length += size;
}

const unsigned char *stub_told(size_t *size) { return *size = length, length = 0, told; }
void stub_quiet(int yes) { quiet = yes; }
void stub_refuse(int status, int times) { refusal = status, refusals = times; }  // the next launches or maps

int cuLaunchKernelEx(const Config *config, const unsigned *function, void **parameters, void **extra) {
  if (refusals && refusals--) return refusal;
  if (quiet) return 0;
  note(config->shape, sizeof config->shape);
  note(&config->stream, 8), note(&config->count, 4), note(&extra, 8);
  if (config->count) note(config->attributes, config->count * sizeof(Attribute));
  note(&function, 8);
  for (unsigned i = 0; i < function[0]; i++) note(parameters[i], function[1 + i]);
  return 0;
}

int cuDriverGetVersion(int *version) { return *version = stub_version, 0; }

static uint64_t mixed(uint64_t hash, const void *from, size_t size) {
  for (size_t i = 0; i < size; i++) hash = (hash ^ ((const unsigned char *)from)[i]) * 1099511628211u;
  return hash;
}

int cuTensorMapEncodeTiled(unsigned char *map, unsigned dtype, unsigned rank, void *address, const uint64_t *sizes,
                           const uint64_t *strides, const unsigned *box, const unsigned *steps, unsigned interleave,
                           unsigned swizzle, unsigned promotion, unsigned beyond) {
  if ((uintptr_t)map & 63) return 1;
  if (refusals && refusals--) return refusal;
  const unsigned numbers[6] = {dtype, rank, interleave, swizzle, promotion, beyond};
  uint64_t hash = mixed(14695981039346656037u, numbers, sizeof numbers);
  hash = mixed(mixed(hash, sizes, 8 * rank), strides, 8 * (rank - 1));
  hash = mixed(mixed(hash, box, 4 * rank), steps, 4 * rank);
  memset(map, rank, 128);
  memcpy(map, &address, 8), memcpy(map + 64, &hash, 8);
  return 0;
}

int cuGetErrorName(int status, const char **name) {
  static char text[32];
  snprintf(text, sizeof text, "CUDA_ERROR_%d", status);
  return *name = text, 0;
}

int cuDevicePrimaryCtxRetain(void **context, int device) { return *context = (void *)(uintptr_t)(device + 1), 0; }
int cuCtxGetCurrent(void **context) { return *context = stub_context, 0; }
int cuStreamGetCaptureInfo_v2(void *stream, int *capturing, uint64_t *number, void *graph, void *before, void *count) {
  return *capturing = stub_capturing, *number = stub_capture, graph || before || count || !stream;
}
int cuStreamIsCapturing(void *stream, int *capturing) { return *capturing = stub_capturing, stream == 0; }
int cuCtxSetCurrent(void *context) { return context == 0; }
int aoti_torch_get_current_cuda_stream(int device, void **stream) { return *stream = stub_stream, 0 * device; }
