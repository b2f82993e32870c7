/* rung
number = "03"
title = "Parallel over the queries"
idea = """The loops change places: a block owns one query tile and walks over the keys. Output and statistics stay \
in registers until the end, and there are N / BM times as many blocks."""
source = "The fp32 CUDA ladder, kernel 3; FlashAttention-2 (Dao 2023), sections 3.1 and 3.2"
claim = "122 ms, 3.37 TFLOP/s on an RTX A6000: 1.8x over kernel 2"
arch = 75
dtypes = ["float32"]
dims = [32, 64, 128]
causal = true
before = "02"
expect = """Output is written once instead of N / BN times (bytes to device memory and L2), and every SM has work \
where B x H is small (achieved occupancy, SM busy)."""
block = "BM * BN"
grid = "[cdiv(N, BM), BH]"
shared = "4 * ((BM + 2 * BN) * D + BM * BN)"
workspace = "0"
[parameters]
BM = 32
BN = 32
*/

// Thread (y, x) of a block owns one score and D / BN channels of the output:
//
//                       k_smem [BN][D]             v_smem [BN][D]
//                       row x                      channels x, x + BN, ...
//   q_smem [BM][D]      |                          |
//   row y  ->  s_smem [BM][BN], (y, x)   ->   o, row y: in registers

#define LOG2_E 1.4426950408889634f
#define MINUS_INFINITY __int_as_float(0xff800000)

constexpr int THREADS = BM * BN;

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
    float* s_smem = v_smem + BN * D;   // [BM][BN]

    const int x = threadIdx.x % BN, y = threadIdx.x / BN;
    const int q_first = blockIdx.x * BM, row = q_first + y;
    const size_t head = (size_t)blockIdx.y * n * D;
    q += head, k += head, v += head, out += head;

    load_tile<BM>(q_smem, q, q_first, n, softmax_scale * LOG2_E);
    float o[D / BN] = {}, m = MINUS_INFINITY, l = 0.0f;

    const int k_end = CAUSAL ? min(n, q_first + BM) : n;
    for (int k_first = 0; k_first < k_end; k_first += BN) {
        load_tile<BN>(k_smem, k, k_first, n, 1.0f);
        load_tile<BN>(v_smem, v, k_first, n, 1.0f);
        // Queries, keys and values are whole.
        __syncthreads();

        // One score, in log2 units
        float s = 0.0f;
        for (int c = 0; c < D; ++c) s += q_smem[y * D + c] * k_smem[x * D + c];
        s_smem[y * BN + x] = visible(row, k_first + x, n) ? s : MINUS_INFINITY;
        // Scores are whole.
        __syncthreads();

        // Softmax: every thread of a row finds the same maximum
        const float m_old = m;
        for (int j = 0; j < BN; ++j) m = fmaxf(m, s_smem[y * BN + j]);
        const float p = exp2f(s_smem[y * BN + x] - m);
        // All have read the scores: they may be overwritten.
        __syncthreads();
        s_smem[y * BN + x] = p;
        // Probabilities are whole.
        __syncthreads();

        const float alpha = exp2f(m_old - m);
        l *= alpha;
        for (int j = 0; j < BN; ++j) l += s_smem[y * BN + j];

        // Output, normalised at the end
        for (int c = 0; c < D / BN; ++c) {
            o[c] *= alpha;
            for (int j = 0; j < BN; ++j) o[c] += s_smem[y * BN + j] * v_smem[j * D + x + BN * c];
        }
        // The tiles have been read: they may be overwritten.
        __syncthreads();
    }

    for (int c = 0; c < D / BN && row < n; ++c) out[(size_t)row * D + x + BN * c] = o[c] / l;
}
