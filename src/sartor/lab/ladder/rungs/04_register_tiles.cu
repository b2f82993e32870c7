/* rung
number = "04"
title = "Register micro-tiles"
idea = """Each thread computes TM x TN scores as outer products in registers: TM + TN values from shared memory feed \
TM * TN multiply-adds, where one score took two values for each. The row maximum goes through shuffles."""
source = "The fp32 CUDA ladder, kernel 4"
claim = "37.3 ms, 11.06 TFLOP/s on an RTX A6000: 3.3x over kernel 3"
arch = 75
dtypes = ["float32"]
dims = [32, 64, 128]
causal = true
before = "03"
expect = """A quarter of the shared loads per multiply-add (LDS instructions), and with them the stalls on the \
shared-memory queue (MIO throttle)."""
block = "(BM // TM) * (BN // TN)"
grid = "[cdiv(N, BM), BH]"
shared = "4 * ((BM + 2 * BN) * D + BM * BN)"
workspace = "0"
[parameters]
BM = 32
BN = 32
TM = 4
TN = 4
*/

// Thread (y, x) of Y x X owns TM x TN scores and TM x TD outputs. Rows, keys and channels are dealt out in turn:
//
//                         k_smem [BN][D]                v_smem [BN][D]
//                         rows x, x + X, ...            channels x, x + X, ...
//   q_smem [BM][D]        |                             |
//   rows y, y + Y, ... -> s [TM][TN] -> p_smem [BM][BN] -> o [TM][TD]
//
// The X threads of a row sit in one warp, so p_smem needs no barrier of the block.

#define LOG2_E 1.4426950408889634f
#define MINUS_INFINITY __int_as_float(0xff800000)

constexpr int X = BN / TN, Y = BM / TM, THREADS = X * Y, TD = D / X;
static_assert(32 % X == 0, "the threads of a row must share a warp");

__device__ bool visible(int row, int key, int n) { return key < n && (!CAUSAL || key <= row); }

// Rows [first, first + ROWS) of an (n, D) matrix, times a factor; rows past the end become zeros.
template <int ROWS>
__device__ void load_tile(float* smem, const float* gmem, int first, int n, float factor) {
    for (int i = threadIdx.x; i < ROWS * D; i += THREADS) {
        const int row = i / D, c = i % D;
        smem[row * D + c] = first + row < n ? gmem[(size_t)(first + row) * D + c] * factor : 0.0f;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) rung(
    const float* q,  // (heads, n, D)
    const float* k,  // (heads, n, D)
    const float* v,  // (heads, n, D)
    float* out,      // (heads, n, D)
    float* workspace,  // not used
    int heads, int n, float softmax_scale) {
    extern __shared__ float smem[];
    float* q_smem = smem;              // [BM][D]
    float* k_smem = q_smem + BM * D;   // [BN][D]
    float* v_smem = k_smem + BN * D;   // [BN][D]
    float* p_smem = v_smem + BN * D;   // [BM][BN]

    const int x = threadIdx.x % X, y = threadIdx.x / X;
    const int q_first = blockIdx.x * BM;
    const size_t head = (size_t)blockIdx.y * n * D;
    q += head, k += head, v += head, out += head;

    load_tile<BM>(q_smem, q, q_first, n, softmax_scale * LOG2_E);
    float o[TM][TD] = {}, m[TM], l[TM] = {};  // l: of this thread's keys
    for (int i = 0; i < TM; ++i) m[i] = MINUS_INFINITY;

    const int k_end = CAUSAL ? min(n, q_first + BM) : n;
    for (int k_first = 0; k_first < k_end; k_first += BN) {
        load_tile<BN>(k_smem, k, k_first, n, 1.0f);
        load_tile<BN>(v_smem, v, k_first, n, 1.0f);
        // Queries, keys and values are whole.
        __syncthreads();

        // Scores, in log2 units: one outer product a channel
        float s[TM][TN] = {};
#pragma unroll 4
        for (int c = 0; c < D; ++c) {
            float q_rmem[TM], k_rmem[TN];
            for (int i = 0; i < TM; ++i) q_rmem[i] = q_smem[(y + Y * i) * D + c];
            for (int j = 0; j < TN; ++j) k_rmem[j] = k_smem[(x + X * j) * D + c];
            for (int i = 0; i < TM; ++i)
                for (int j = 0; j < TN; ++j) s[i][j] += q_rmem[i] * k_rmem[j];
        }

        // Softmax: the maximum over the X threads of a row by shuffles
        for (int i = 0; i < TM; ++i) {
            const float m_old = m[i];
            for (int j = 0; j < TN; ++j) {
                if (!visible(q_first + y + Y * i, k_first + x + X * j, n)) s[i][j] = MINUS_INFINITY;
                m[i] = fmaxf(m[i], s[i][j]);
            }
            for (int lanes = X / 2; lanes; lanes /= 2) m[i] = fmaxf(m[i], __shfl_xor_sync(~0u, m[i], lanes));
            const float alpha = exp2f(m_old - m[i]);
            l[i] *= alpha;
            for (int j = 0; j < TN; ++j) {
                const float p = exp2f(s[i][j] - m[i]);
                p_smem[(y + Y * i) * BN + x + X * j] = p;
                l[i] += p;
            }
            for (int c = 0; c < TD; ++c) o[i][c] *= alpha;
        }
        // The warp's probabilities are whole.
        __syncwarp();

        // Output: one outer product a key
#pragma unroll 4
        for (int j = 0; j < BN; ++j) {
            float p_rmem[TM], v_rmem[TD];
            for (int i = 0; i < TM; ++i) p_rmem[i] = p_smem[(y + Y * i) * BN + j];
            for (int c = 0; c < TD; ++c) v_rmem[c] = v_smem[j * D + x + X * c];
            for (int i = 0; i < TM; ++i)
                for (int c = 0; c < TD; ++c) o[i][c] += p_rmem[i] * v_rmem[c];
        }
        // The tiles have been read: they may be overwritten.
        __syncthreads();
    }

    for (int i = 0; i < TM; ++i) {
        for (int lanes = X / 2; lanes; lanes /= 2) l[i] += __shfl_xor_sync(~0u, l[i], lanes);
        const int row = q_first + y + Y * i;
        for (int c = 0; c < TD && row < n; ++c) out[(size_t)row * D + x + X * c] = o[i][c] / l[i];
    }
}
