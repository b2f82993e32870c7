/* rung
number = "12"
title = "Registers, exp2, tuned tiles"
idea = """A warp owns 32 query rows, so that each fragment of K and V, loaded just before it is needed, feeds twice the \
products. The softmax shrinks to one multiply-add and one exp2 a score: row sums come out of the tensor cores, and the \
output is rescaled only where a maximum has grown a lot. The tile is the fastest of a search."""
source = "The 16-bit tensor-core series, its end; FlashAttention-2 (Dao 2023), section 3.3; FlashAttention-4, the rarer rescale"
claim = "99 % of FlashAttention-2 on an A100, where the series ends"
arch = 80
dtypes = ["bfloat16", "float16"]
dims = [32, 64, 128]
causal = true
before = "11"
expect = """Fewer than half the instructions a product (smsp__inst_executed) and half the shared-memory reads, hence a busier \
tensor pipe (sm__pipe_tensor_op_hmma_cycles_active): its own throttle becomes the first stall, although no more than 8 \
warps fit on an SM."""
block = "BM // ROWS * 32"
grid = "[cdiv(N, BM), BH]"
shared = "2 * D * (BM + 4 * BN)"
workspace = "0"
[parameters]
BM = 128
ROWS = 32
BN = 64
[parameters.64]
BN = 128
[parameters.32]
BN = 32
[search]
BM = [64, 128, 256]
ROWS = [16, 32]
BN = [32, 48, 64, 96, 128]
*/

#include "mma.cuh"

constexpr int CHUNKS = D / 8;     // pieces of 16 bytes in a row: what cp.async copies and a lane of ldmatrix addresses
constexpr int TILES = ROWS / 16;  // each of the 16 query rows of one mma
constexpr int THREADS = BM / ROWS * 32;
static_assert(ROWS % 16 == 0 && BM % ROWS == 0 && BN % 16 == 0, "warps own whole tiles of mma");

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
        if (i + THREADS / CHUNKS <= HEIGHT || i + row < HEIGHT)
            cp_async(smem + at(i + row, chunk), source + i * D, first + i + row < n);
}

// s = q k^T: [ROWS, D] @ [D, BN], each fragment loaded just before its products. The addresses are those of a lane's first
// fragment; the swizzle is an exclusive or, and so is the step to chunk 2 d.
__device__ __forceinline__ void scores(float (&s)[TILES][BN / 8][4], u32 q_lane, u32 k_lane) {
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
        for (int i = 0; i < BN / 8; i++)
#pragma unroll
            for (int e = 0; e < 4; e++) s[t][i][e] = 0.0f;
#pragma unroll
    for (int d = 0; d < D / 16; d++) {
        u32 q[TILES][4];
#pragma unroll
        for (int t = 0; t < TILES; t++) ldmatrix(q[t], (q_lane ^ d * 32) + t * 16 * D * 2);
#pragma unroll
        for (int i = 0; i < BN / 16; i++) {
            u32 k[4];
            ldmatrix(k, (k_lane ^ d * 32) + i * 16 * D * 2);
#pragma unroll
            for (int t = 0; t < TILES; t++) {
                mma(s[t][2 * i], q[t], k[0], k[1]);
                mma(s[t][2 * i + 1], q[t], k[2], k[3]);
            }
        }
    }
}

// -inf where a key lies beyond the sequence or, if causal, after its query.
__device__ __forceinline__ void mask(float (&s)[TILES][BN / 8][4], int query, int key, int n) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
        for (int i = 0; i < BN / 8; i++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int row = query + t * 16 + lane / 4 + e / 2 * 8, column = key + i * 8 + lane % 4 * 2 + e % 2;
                if (column >= n || (CAUSAL && column > row)) s[t][i][e] = MINUS_INFINITY;
            }
}

// Keeps the references m that weights 2^(scale s - m) are taken against, and l and o with them: one is raised to the row's
// maximum only when some weight of the warp would exceed 2^8, which after the first tile is rare. Any reference gives the same
// quotient o / l, and 16-bit floats lose nothing up to there.
__device__ __forceinline__ void raise(
    float (&m)[TILES][2], float (&l)[TILES][4], float (&o)[TILES][D / 8][4], const float (&s)[TILES][BN / 8][4], float scale) {
    float top[TILES][2];
    bool raised = false;
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            top[t][r] = MINUS_INFINITY;
#pragma unroll
            for (int i = 0; i < BN / 8; i++) top[t][r] = fmaxf(top[t][r], fmaxf(s[t][i][2 * r], s[t][i][2 * r + 1]));
            raised |= top[t][r] * scale > m[t][r] + 8.0f;
        }
    if (!__any_sync(0xffffffff, raised)) return;
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const float next = fmaxf(m[t][r], quad_max(top[t][r]) * scale), rescale = exp2_approx(m[t][r] - next);
            m[t][r] = next;
            l[t][2 * r] *= rescale;
#pragma unroll
            for (int d = 0; d < D / 8; d++) o[t][d][2 * r] *= rescale, o[t][d][2 * r + 1] *= rescale;
        }
}

// The weights 2^(scale s - m), rounded to 16 bits, as left operands.
__device__ __forceinline__ void weights(
    u32 (&p)[TILES][BN / 16][4], const float (&s)[TILES][BN / 8][4], const float (&m)[TILES][2], float scale) {
#pragma unroll
    for (int i = 0; i < BN / 8; i++)
#pragma unroll
        for (int t = 0; t < TILES; t++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const float left = exp2_approx(fmaf(s[t][i][2 * r], scale, -m[t][r]));
                const float right = exp2_approx(fmaf(s[t][i][2 * r + 1], scale, -m[t][r]));
                p[t][i / 2][i % 2 * 2 + r] = pack(left, right);
            }
}

// o += p v: [ROWS, BN] @ [BN, D], each fragment loaded just before its products; and l += p 1, every column of which is the
// weights' row sum.
__device__ __forceinline__ void accumulate(
    float (&o)[TILES][D / 8][4], float (&l)[TILES][4], const u32 (&p)[TILES][BN / 16][4], u32 v_lane) {
    const u32 ones = BF16 ? 0x3f803f80 : 0x3c003c00;
#pragma unroll
    for (int i = 0; i < BN / 16; i++) {
#pragma unroll
        for (int t = 0; t < TILES; t++) mma(l[t], p[t][i], ones, ones);
#pragma unroll
        for (int d = 0; d < D / 16; d++) {
            u32 v[4];
            ldmatrix_trans(v, (v_lane ^ d * 32) + i * 16 * D * 2);
#pragma unroll
            for (int t = 0; t < TILES; t++) {
                mma(o[t][2 * d], p[t][i], v[0], v[1]);
                mma(o[t][2 * d + 1], p[t][i], v[2], v[3]);
            }
        }
    }
}

// Divides by the row sums and writes the rows below n, through shared memory so that each store is of 16 bytes.
__device__ __forceinline__ void store(
    u16* out_gmem, char* o_smem, float (&o)[TILES][D / 8][4], const float (&l)[TILES][4], int query, int n) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    __syncwarp();  // its lanes have all read Q
#pragma unroll
    for (int t = 0; t < TILES; t++) {
        const float upper = 1.0f / l[t][0], lower = 1.0f / l[t][2];
#pragma unroll
        for (int d = 0; d < D / 8; d++) {
            const int row = warp * ROWS + t * 16 + lane / 4, column = lane % 4 * 4;
            *(u32*)(o_smem + at(row, d) + column) = pack(o[t][d][0] * upper, o[t][d][1] * upper);
            *(u32*)(o_smem + at(row + 8, d) + column) = pack(o[t][d][2] * lower, o[t][d][3] * lower);
        }
    }
    __syncwarp();  // a warp writes out its own rows only
#pragma unroll
    for (int i = 0; i < ROWS * CHUNKS; i += 32) {
        const int row = warp * ROWS + (i + lane) / CHUNKS, chunk = lane % CHUNKS;
        if (query + row < n) *(uint4*)(out_gmem + (query + row) * D + chunk * 8) = *(uint4*)(o_smem + at(row, chunk));
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) rung(
    const u16* __restrict__ q,  // (heads, n, D)
    const u16* __restrict__ k,  // (heads, n, D)
    const u16* __restrict__ v,  // (heads, n, D)
    u16* __restrict__ out,      // (heads, n, D)
    float* workspace,           // none
    int heads, int n, float softmax_scale) {
    extern __shared__ __align__(1024) char smem[];
    const u32 q_smem = shared_address(smem);  // [BM, D], later the output
    const u32 kv_smem = q_smem + BM * D * 2;  // [2 stages, K and V, BN, D]
    const size_t head = (size_t)blockIdx.y * n * D;
    const int query = (CAUSAL ? gridDim.x - 1 - blockIdx.x : blockIdx.x) * BM;  // causal: the longest sweeps first
    const int end = CAUSAL ? min(n, query + BM) : n;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const u32 q_lane = q_smem + at(warp * ROWS + lane % 16, lane / 16);
    const u32 k_lane = kv_smem + at(lane / 16 * 8 + lane % 8, lane / 8 % 2);
    const u32 v_lane = kv_smem + BN * D * 2 + at(lane % 16, lane / 16);
    const float scale = softmax_scale * 1.44269504f;  // log2(e): weights are powers of two

    // Prologue
    float m[TILES][2], l[TILES][4] = {}, o[TILES][D / 8][4] = {};
#pragma unroll
    for (int t = 0; t < TILES; t++) m[t][0] = m[t][1] = MINUS_INFINITY;
    load_tile<BM>(q_smem, q + head, query, n);
    load_tile<BN>(kv_smem, k + head, 0, n);
    load_tile<BN>(kv_smem + BN * D * 2, v + head, 0, n);

    // Main loop
    for (int key = 0, stage = 0; key < end; key += BN, stage ^= 1) {
        float s[TILES][BN / 8][4];
        u32 p[TILES][BN / 16][4];
        const u32 tile = stage * 2 * BN * D * 2;  // bytes
        cp_async_wait();
        __syncthreads();  // this tile is in shared memory, and no warp reads the last one any more
        if (key + BN < end) {
            const u32 next_smem = kv_smem + (stage ^ 1) * 2 * BN * D * 2;
            load_tile<BN>(next_smem, k + head, key + BN, n);
            load_tile<BN>(next_smem + BN * D * 2, v + head, key + BN, n);
        }
        scores(s, q_lane, k_lane + tile);
        if (key + BN > (CAUSAL ? min(n, query + 1) : n)) mask(s, query + warp * ROWS, key, n);
        raise(m, l, o, s, scale);
        weights(p, s, m, scale);
        accumulate(o, l, p, v_lane + tile);
    }

    // Epilogue
    store(out + head, smem, o, l, query, n);
}
