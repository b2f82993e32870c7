// The PTX instructions of the 16-bit tensor-core rungs, one wrapper each, and sums over the lanes that share a row. NVRTC has no
// system headers, hence the own types. Needs the define BF16 (1: bfloat16, 0: float16).

#pragma once

typedef unsigned short u16;  // one bfloat16 or float16
typedef unsigned int u32;    // two of them, or an address in shared memory

#define MINUS_INFINITY __int_as_float(0xff800000)

#if BF16
#define DTYPE "bf16"
#else
#define DTYPE "f16"
#endif

// The address of something in shared memory, in bytes, as the instructions below want it.
__device__ __forceinline__ u32 shared_address(const void* smem) {
    return (u32)__cvta_generic_to_shared(smem);
}

// Starts a copy of 16 bytes from device to shared memory; writes zeros, and reads nothing, unless `valid`.
__device__ __forceinline__ void cp_async(u32 smem, const u16* gmem, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(smem), "l"(gmem), "r"(valid ? 16 : 0) : "memory");
}

// Waits until all copies that this thread has started have arrived. Other threads see them after a barrier.
__device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_all;" ::: "memory");
}

// Four 8x8 matrices of 16-bit elements. Lane i gives the address of row i % 8 of matrix i / 8 (16 bytes); afterwards r[j] holds
// row lane / 4, columns lane % 4 * 2 and the next, of matrix j.
__device__ __forceinline__ void ldmatrix(u32 (&r)[4], u32 smem) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(smem)
                 : "memory");
}

// As ldmatrix, each matrix transposed on its way.
__device__ __forceinline__ void ldmatrix_trans(u32 (&r)[4], u32 smem) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(smem)
                 : "memory");
}

// c += a b: [16, 16] @ [16, 8] in 16 bits, added up in float32. A thread holds c at rows lane / 4 (c[0], c[1]) and that + 8
// (c[2], c[3]), columns lane % 4 * 2 and the next. Two neighbouring c, rounded, are the a of a following product.
__device__ __forceinline__ void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." DTYPE "." DTYPE ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Rounds two numbers to 16 bits; `low` gets the lower half.
__device__ __forceinline__ u32 pack(float low, float high) {
    u32 pair;
    asm("cvt.rn." DTYPE "x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

// 2^x in one instruction of the special-function unit; 0 for x = -inf.
__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// The largest and the sum over the four lanes that share a row of an accumulator.
__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffff, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(0xffffffff, x, 1);
    return x + __shfl_xor_sync(0xffffffff, x, 2);
}
