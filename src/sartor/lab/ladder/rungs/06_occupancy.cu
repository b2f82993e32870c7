/* rung
number = "06"
title = "Occupancy tuned"
idea = """Tile, micro-tile and threads are searched, and what an SM holds is planned: two blocks of four warps with \
255 registers a thread, so that 64 scores and 64 outputs stay in them. Eight warps cannot hide the loads, so they go \
by cp.async, keys while the values are used and values while the keys are; a chunk is the whole head dim."""
source = "The fp32 CUDA ladder, kernel 6"
claim = "20.5 ms, 20.10 TFLOP/s on an RTX A6000: 1.06x over kernel 5, 118 % of SDPA"
arch = 80
dtypes = ["float32"]
dims = [32, 64, 128]
causal = true
before = "05"
expect = """Half the shared loads a multiply-add, at an eighth of the warps an SM can hold: occupancy falls and \
speed rises. Issue slots go to FFMA, barrier and long-scoreboard stalls shrink."""
block = "(BM // TM) * (BN // TN)"
grid = "[cdiv(N, BM), BH]"
shared = "4 * ((BM + 2 * BN) * (D + 4) + BM * (BN + BN // TN))"
workspace = "0"
[parameters]
BM = 128
BN = 64
TM = 8
TN = 8
BLOCKS = 2
UNROLL = 2
[parameters.128]
TN = 4
BLOCKS = 1
UNROLL = 8
[search]
BM = [64, 128, 256]
BN = [32, 64, 128]
TM = [4, 8]
TN = [4, 8]
BLOCKS = [1, 2, 3]
*/

// Thread (y, x) of Y x X owns TM x TN scores and TM x TD outputs. Rows, keys and channels are dealt out in turn,
// channels by fours:
//
//                         k_smem [BN][D + 4]              v_smem [BN][D + 4]
//                         rows x, x + X, ...              channels 4x ... 4x + 3, 4x + 4X, ...
//   q_smem [BM][D + 4]    |                               |
//   rows y, y + Y, ... -> s [TM][TN] -> p_smem [BM][BN + X] -> o [TM][TD]
//
// Four floats of padding move each row on by four banks: eight threads read 16 bytes of eight rows at once. Threads 2t
// and 2t + 1 differ in y only, pairs in x: where neighbours share addresses, a warp's 128-bit load takes two wavefronts
// instead of four. The X threads of a row sit in one warp, so p_smem needs no barrier of the block.

#define LOG2_E 1.4426950408889634f
#define MINUS_INFINITY __int_as_float(0xff800000)

constexpr int X = BN / TN, Y = BM / TM, THREADS = X * Y, TD = D / X;
constexpr int PITCH = D + 4, P_PITCH = BN + X, STEPS = UNROLL;
static_assert(32 % (2 * X) == 0, "the threads of two rows must share a warp");
static_assert(THREADS % 32 == 0 && TD % 4 == 0, "a thread needs whole float4 of a row");

__device__ bool visible(int row, int key, int n) { return key < n && (!CAUSAL || key <= row); }

__device__ float4& vector(float* p) { return *reinterpret_cast<float4*>(p); }
__device__ float4 vector(const float* p) { return *reinterpret_cast<const float4*>(p); }
__device__ float4 times(float a, float4 b) { return {a * b.x, a * b.y, a * b.z, a * b.w}; }
__device__ void add_dot(float& s, float4 a, float4 b) {
    s += a.x * b.x, s += a.y * b.y, s += a.z * b.z, s += a.w * b.w;
}
__device__ void add_times(float4& o, float a, float4 b) {
    o.x += a * b.x, o.y += a * b.y, o.z += a * b.z, o.w += a * b.w;
}

__device__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Rows [first, first + ROWS) of an (n, D) matrix, times a factor; rows past the end become zeros.
template <int ROWS>
__device__ void load_tile(float* smem, const float* gmem, int first, int n, float factor) {
    const int c = threadIdx.x % (D / 4) * 4;
    for (int i = threadIdx.x / (D / 4); i < ROWS; i += THREADS / (D / 4)) {
        float4 t = {0.0f, 0.0f, 0.0f, 0.0f};
        if (first + i < n) t = vector(gmem + (size_t)(first + i) * D + c);
        vector(smem + i * PITCH + c) = times(factor, t);
    }
}

// Starts the same copy, as it is; it goes on while the thread computes.
template <int ROWS>
__device__ void load_tile_async(float* smem, const float* gmem, int first, int n) {
    const int c = threadIdx.x % (D / 4) * 4;
#pragma unroll
    for (int i = threadIdx.x / (D / 4); i < ROWS; i += THREADS / (D / 4)) {
        const unsigned to = __cvta_generic_to_shared(smem + i * PITCH + c);
        const float* from = gmem + (size_t)min(first + i, n - 1) * D + c;
        const int bytes = first + i < n ? 16 : 0;  // the other 16 - bytes become zeros
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes));
    }
}

// Waits for the block's copies.
__device__ void wait_for_tiles() {
    asm volatile("cp.async.wait_all;");
    __syncthreads();
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) rung(
    const float* q,  // (heads, n, D)
    const float* k,  // (heads, n, D)
    const float* v,  // (heads, n, D)
    float* out,      // (heads, n, D)
    float* workspace,  // not used
    int heads, int n, float softmax_scale) {
    extern __shared__ __align__(16) float smem[];
    float* q_smem = smem;                    // [BM][D + 4]
    float* k_smem = q_smem + BM * PITCH;     // [BN][D + 4]
    float* v_smem = k_smem + BN * PITCH;     // [BN][D + 4]
    float* p_smem = v_smem + BN * PITCH;     // [BM][BN + X]

    const int x = threadIdx.x / 2 % X, y = threadIdx.x / (2 * X) * 2 + threadIdx.x % 2;
    const int q_first = (CAUSAL ? gridDim.x - 1 - blockIdx.x : blockIdx.x) * BM;  // the longest rows first
    const size_t head = (size_t)blockIdx.y * n * D;
    q += head, k += head, v += head, out += head;

    load_tile_async<BN>(k_smem, k, 0, n);
    load_tile<BM>(q_smem, q, q_first, n, softmax_scale * LOG2_E);
    float4 o[TM][TD / 4] = {};
    float m[TM], l[TM] = {};  // l: of this thread's keys
    for (int i = 0; i < TM; ++i) m[i] = MINUS_INFINITY;

    const int k_end = CAUSAL ? min(n, q_first + BM) : n;
    for (int k_first = 0; k_first < k_end; k_first += BN) {
        // Keys are whole; the values of the tile before have been read, and may be overwritten.
        wait_for_tiles();
        load_tile_async<BN>(v_smem, v, k_first, n);

        // Scores, in log2 units: four channels at a time
        float s[TM][TN] = {};
#pragma unroll STEPS
        for (int c = 0; c < D; c += 4) {
            float4 k_rmem[TN];
            for (int j = 0; j < TN; ++j) k_rmem[j] = vector(k_smem + (x + X * j) * PITCH + c);
            for (int i = 0; i < TM; ++i) {
                const float4 q_rmem = vector(q_smem + (y + Y * i) * PITCH + c);
                for (int j = 0; j < TN; ++j) add_dot(s[i][j], q_rmem, k_rmem[j]);
            }
        }
        // Only a tile on the edge is masked.
        if (k_first + BN > (CAUSAL ? min(n, q_first + 1) : n))
            for (int i = 0; i < TM; ++i)
                for (int j = 0; j < TN; ++j)
                    if (!visible(q_first + y + Y * i, k_first + x + X * j, n)) s[i][j] = MINUS_INFINITY;

        // Softmax: the maximum over the X threads of a row by shuffles
        for (int i = 0; i < TM; ++i) {
            const float m_old = m[i];
            for (int j = 0; j < TN; ++j) m[i] = fmaxf(m[i], s[i][j]);
            for (int lanes = X; lanes > 1; lanes /= 2) m[i] = fmaxf(m[i], __shfl_xor_sync(~0u, m[i], lanes));
            const float alpha = exp2_approx(m_old - m[i]);
            l[i] *= alpha;
            for (int j = 0; j < TN; ++j) {
                const float p = exp2_approx(s[i][j] - m[i]);
                p_smem[(y + Y * i) * P_PITCH + x + X * j] = p;
                l[i] += p;
            }
            for (int c = 0; c < TD / 4; ++c) o[i][c] = times(alpha, o[i][c]);
        }

        // Values are whole, and the warp's probabilities; the keys have been read, and may be overwritten.
        wait_for_tiles();
        if (k_first + BN < k_end) load_tile_async<BN>(k_smem, k, k_first + BN, n);

        // Output: four keys at a time
#pragma unroll STEPS
        for (int j = 0; j < BN; j += 4) {
            float4 v_rmem[4][TD / 4];
            for (int e = 0; e < 4; ++e)
                for (int c = 0; c < TD / 4; ++c) v_rmem[e][c] = vector(v_smem + (j + e) * PITCH + 4 * (x + X * c));
            for (int i = 0; i < TM; ++i) {
                const float4 p_rmem = vector(p_smem + (y + Y * i) * P_PITCH + j);
                for (int c = 0; c < TD / 4; ++c) {
                    add_times(o[i][c], p_rmem.x, v_rmem[0][c]);
                    add_times(o[i][c], p_rmem.y, v_rmem[1][c]);
                    add_times(o[i][c], p_rmem.z, v_rmem[2][c]);
                    add_times(o[i][c], p_rmem.w, v_rmem[3][c]);
                }
            }
        }
    }

    for (int i = 0; i < TM; ++i) {
        for (int lanes = X; lanes > 1; lanes /= 2) l[i] += __shfl_xor_sync(~0u, l[i], lanes);
        const int row = q_first + y + Y * i;
        for (int c = 0; c < TD / 4 && row < n; ++c)
            vector(out + (size_t)row * D + 4 * (x + X * c)) = times(1.0f / l[i], o[i][c]);
    }
}
