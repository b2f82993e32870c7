/* rung
number = "10"
title = "Swizzled shared memory"
idea = """The pieces of 16 bytes of a row are stored in an order that depends on the row, chunk XOR row, so that the eight \
rows that an ldmatrix reads together lie in eight different groups of banks."""
source = "The 16-bit tensor-core series, announced at the end of part 3"
claim = "none for this step alone in the part at hand"
arch = 80
dtypes = ["bfloat16", "float16"]
dims = [32, 64, 128]
causal = true
before = "09"
expect = """An ldmatrix takes 4 wavefronts instead of 32: bank conflicts of loads (l1tex__data_bank_conflicts_pipe_lsu_mem_\
shared_op_ld) all but vanish, short_scoreboard is no longer the first stall, and time falls about fourfold. What is left \
is the wait for tiles (long_scoreboard)."""
block = "THREADS"
grid = "[cdiv(N, BM), BH]"
shared = "2 * D * (BM + 2 * BN)"
workspace = "0"
[parameters]
BM = 64
BN = 64
THREADS = 128
*/

#include "mma.cuh"

constexpr int CHUNKS = D / 8;  // pieces of 16 bytes in a row: what cp.async copies and a lane of ldmatrix addresses
static_assert(BM == THREADS / 32 * 16, "a warp owns the 16 query rows of one mma");
static_assert(BM % (THREADS / CHUNKS) == 0 && BN % (THREADS / CHUNKS) == 0, "a tile is copied in whole rounds");

// The byte at which a chunk of a row of a tile begins. Swizzled: any eight rows that one ldmatrix reads together have their
// chunk in eight different groups of four banks. (At D = 32 two rows share the 128 bytes that the 32 banks hold.)
__device__ __forceinline__ int at(int row, int chunk) {
    return row * D * 2 + (chunk ^ (D == 32 ? row >> 1 & 3 : row & 7)) * 16;
}

// Starts copying rows first.. of one head's (n, D) to a tile of HEIGHT rows; rows from n on become zeros.
template <int HEIGHT>
__device__ __forceinline__ void load_tile(u32 smem, const u16* gmem, int first, int n) {
    const int row = threadIdx.x / CHUNKS, chunk = threadIdx.x % CHUNKS;
    const u16* source = gmem + (first + row) * D + chunk * 8;
#pragma unroll
    for (int i = 0; i < HEIGHT; i += THREADS / CHUNKS)
        cp_async(smem + at(i + row, chunk), source + i * D, first + i + row < n);
}

// The 16 query rows of this warp as left operands.
__device__ __forceinline__ void load_query(u32 (&q)[D / 16][4], u32 q_smem) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int d = 0; d < D / 16; d++) ldmatrix(q[d], q_smem + at(warp * 16 + lane % 16, d * 2 + lane / 16));
}

// s = q k^T: [16, D] @ [D, BN]. First all fragments of the tile, then all products.
__device__ __forceinline__ void scores(float (&s)[BN / 8][4], const u32 (&q)[D / 16][4], u32 k_smem) {
    const int lane = threadIdx.x % 32;
    u32 k[BN / 16][D / 16][4];
#pragma unroll
    for (int i = 0; i < BN / 16; i++)
#pragma unroll
        for (int d = 0; d < D / 16; d++)
            ldmatrix(k[i][d], k_smem + at(i * 16 + lane / 16 * 8 + lane % 8, d * 2 + lane / 8 % 2));
#pragma unroll
    for (int i = 0; i < BN / 8; i++)
#pragma unroll
        for (int e = 0; e < 4; e++) s[i][e] = 0.0f;
#pragma unroll
    for (int d = 0; d < D / 16; d++)
#pragma unroll
        for (int i = 0; i < BN / 16; i++) {
            mma(s[2 * i], q[d], k[i][d][0], k[i][d][1]);
            mma(s[2 * i + 1], q[d], k[i][d][2], k[i][d][3]);
        }
}

// -inf where a key lies beyond the sequence or, if causal, after its query.
__device__ __forceinline__ void mask(float (&s)[BN / 8][4], int query, int key, int n) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < BN / 8; i++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int row = query + lane / 4 + e / 2 * 8, column = key + i * 8 + lane % 4 * 2 + e % 2;
            if (column >= n || (CAUSAL && column > row)) s[i][e] = MINUS_INFINITY;
        }
}

// Turns scores into weights p = exp(softmax_scale s - m) and brings l and o to the new row maximum m. A thread holds two rows,
// lane / 4 and that + 8. l is this thread's share of the row sum.
__device__ __forceinline__ void softmax(
    float (&s)[BN / 8][4], float (&m)[2], float (&l)[2], float (&o)[D / 8][4], float softmax_scale) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float top = m[r];
#pragma unroll
        for (int i = 0; i < BN / 8; i++)
#pragma unroll
            for (int e = 2 * r; e < 2 * r + 2; e++) {
                s[i][e] *= softmax_scale;
                top = fmaxf(top, s[i][e]);
            }
        top = quad_max(top);
        const float rescale = expf(m[r] - top);
        m[r] = top;
        l[r] *= rescale;
#pragma unroll
        for (int d = 0; d < D / 8; d++) o[d][2 * r] *= rescale, o[d][2 * r + 1] *= rescale;
#pragma unroll
        for (int i = 0; i < BN / 8; i++)
#pragma unroll
            for (int e = 2 * r; e < 2 * r + 2; e++) {
                s[i][e] = expf(s[i][e] - top);
                l[r] += s[i][e];
            }
    }
}

// o += p v: [16, BN] @ [BN, D]. First all fragments of the tile, then all products; p is rounded to 16 bits on the way.
__device__ __forceinline__ void accumulate(float (&o)[D / 8][4], const float (&p)[BN / 8][4], u32 v_smem) {
    const int lane = threadIdx.x % 32;
    u32 v[BN / 16][D / 16][4];
#pragma unroll
    for (int i = 0; i < BN / 16; i++)
#pragma unroll
        for (int d = 0; d < D / 16; d++)
            ldmatrix_trans(v[i][d], v_smem + at(i * 16 + lane % 16, d * 2 + lane / 16));
#pragma unroll
    for (int i = 0; i < BN / 16; i++) {
        const float(&left)[4] = p[2 * i], (&right)[4] = p[2 * i + 1];
        const u32 a[4] = {pack(left[0], left[1]), pack(left[2], left[3]), pack(right[0], right[1]), pack(right[2], right[3])};
#pragma unroll
        for (int d = 0; d < D / 16; d++) {
            mma(o[2 * d], a, v[i][d][0], v[i][d][1]);
            mma(o[2 * d + 1], a, v[i][d][2], v[i][d][3]);
        }
    }
}

// Divides by the row sums and writes the rows below n, through shared memory so that each store is of 16 bytes.
__device__ __forceinline__ void store(
    u16* out_gmem, char* o_smem, float (&o)[D / 8][4], const float (&l)[2], int query, int n) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const float upper = 1.0f / quad_sum(l[0]), lower = 1.0f / quad_sum(l[1]);
#pragma unroll
    for (int d = 0; d < D / 8; d++) {
        const int row = warp * 16 + lane / 4, column = lane % 4 * 4;
        *(u32*)(o_smem + at(row, d) + column) = pack(o[d][0] * upper, o[d][1] * upper);
        *(u32*)(o_smem + at(row + 8, d) + column) = pack(o[d][2] * lower, o[d][3] * lower);
    }
    __syncwarp();  // a warp writes out its own rows only
#pragma unroll
    for (int i = 0; i < 16 * CHUNKS; i += 32) {
        const int row = warp * 16 + (i + lane) / CHUNKS, chunk = lane % CHUNKS;
        if (query + row < n) *(uint4*)(out_gmem + (query + row) * D + chunk * 8) = *(uint4*)(o_smem + at(row, chunk));
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) rung(
    const u16* __restrict__ q,  // (heads, n, D)
    const u16* __restrict__ k,  // (heads, n, D)
    const u16* __restrict__ v,  // (heads, n, D)
    u16* __restrict__ out,      // (heads, n, D)
    float* workspace,           // none
    int heads, int n, float softmax_scale) {
    extern __shared__ __align__(1024) char smem[];
    const u32 q_smem = shared_address(smem);  // [BM, D], later the output
    const u32 k_smem = q_smem + BM * D * 2;   // [BN, D]
    const u32 v_smem = k_smem + BN * D * 2;   // [BN, D]
    const size_t head = (size_t)blockIdx.y * n * D;
    const int query = (CAUSAL ? gridDim.x - 1 - blockIdx.x : blockIdx.x) * BM;  // causal: the longest sweeps first
    const int end = CAUSAL ? min(n, query + BM) : n;

    // Prologue
    float m[2] = {MINUS_INFINITY, MINUS_INFINITY}, l[2] = {0.0f, 0.0f}, o[D / 8][4] = {};
    u32 q_rmem[D / 16][4];
    load_tile<BM>(q_smem, q + head, query, n);
    cp_async_wait();
    __syncthreads();  // Q is in shared memory
    load_query(q_rmem, q_smem);

    // Main loop
    for (int key = 0; key < end; key += BN) {
        float s[BN / 8][4];
        load_tile<BN>(k_smem, k + head, key, n);
        cp_async_wait();
        __syncthreads();  // K is in shared memory, and no warp reads the last V any more
        scores(s, q_rmem, k_smem);
        if (key + BN > (CAUSAL ? min(n, query + 1) : n)) mask(s, query + threadIdx.x / 32 * 16, key, n);
        softmax(s, m, l, o, softmax_scale);
        load_tile<BN>(v_smem, v + head, key, n);
        cp_async_wait();
        __syncthreads();  // V is in shared memory, and no warp reads this K any more
        accumulate(o, s, v_smem);
    }

    // Epilogue
    store(out + head, smem, o, l, query, n);
}
