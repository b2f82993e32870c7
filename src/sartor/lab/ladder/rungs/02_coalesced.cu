/* rung
number = "02"
title = "Coalesced loads"
idea = """BM x BN threads instead of BM: they load tiles together, neighbours reading neighbouring addresses, then \
compute one score each. A warp's load becomes four 32-byte sectors a row instead of 32 rows."""
source = "The fp32 CUDA ladder, kernel 2"
claim = "223 ms, 1.85 TFLOP/s on an RTX A6000: 5.0x over kernel 1"
arch = 75
dtypes = ["float32"]
dims = [32, 64, 128]
causal = true
before = "01"
expect = """Several times faster: 32 warps a block instead of one, and four sectors per request to device memory \
instead of 32."""
block = "BM * BN"
grid = "[BH]"
shared = "4 * ((BM + 2 * BN) * D + BM * BN)"
workspace = "2 * BH * N"
[parameters]
BM = 32
BN = 32
*/

// Thread (y, x) of a block owns one score and D / BN channels of the output:
//
//                       k_smem [BN][D]             v_smem [BN][D]
//                       row x                      channels x, x + BN, ...
//   q_smem [BM][D]      |                          |
//   row y  ->  s_smem [BM][BN], (y, x)   ->   out, row y: read and written in device memory

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
    float* workspace,  // (2, heads, n): row maximum in log2 units, row sum
    int heads, int n, float softmax_scale) {
    extern __shared__ float smem[];
    float* q_smem = smem;              // [BM][D]
    float* k_smem = q_smem + BM * D;   // [BN][D]
    float* v_smem = k_smem + BN * D;   // [BN][D]
    float* s_smem = v_smem + BN * D;   // [BM][BN]

    const int x = threadIdx.x % BN, y = threadIdx.x / BN;
    const size_t head = (size_t)blockIdx.x * n;
    q += head * D, k += head * D, v += head * D, out += head * D;
    float* m = workspace + head;
    float* l = workspace + (size_t)heads * n + head;

    for (int k_first = 0; k_first < n; k_first += BN) {
        load_tile<BN>(k_smem, k, k_first, n, 1.0f);
        load_tile<BN>(v_smem, v, k_first, n, 1.0f);

        for (int q_first = CAUSAL ? k_first / BM * BM : 0; q_first < n; q_first += BM) {
            const int row = q_first + y;
            load_tile<BM>(q_smem, q, q_first, n, softmax_scale * LOG2_E);
            // Queries, keys and values are whole.
            __syncthreads();

            // One score, in log2 units
            float s = 0.0f;
            for (int c = 0; c < D; ++c) s += q_smem[y * D + c] * k_smem[x * D + c];
            s_smem[y * BN + x] = visible(row, k_first + x, n) ? s : MINUS_INFINITY;
            // Scores are whole.
            __syncthreads();

            // Softmax: every thread of a row finds the same maximum
            const float m_old = k_first && row < n ? m[row] : MINUS_INFINITY;
            float m_new = m_old;
            for (int j = 0; j < BN; ++j) m_new = fmaxf(m_new, s_smem[y * BN + j]);
            const float p = exp2f(s_smem[y * BN + x] - m_new);
            // All have read the scores: they may be overwritten.
            __syncthreads();
            s_smem[y * BN + x] = p;
            // Probabilities are whole.
            __syncthreads();

            const float l_old = k_first && row < n ? l[row] * exp2f(m_old - m_new) : 0.0f;
            float l_new = l_old;
            for (int j = 0; j < BN; ++j) l_new += s_smem[y * BN + j];

            // Output, normalised after every tile
            for (int c = x; c < D && row < n; c += BN) {
                float o = k_first ? l_old * out[(size_t)row * D + c] : 0.0f;
                for (int j = 0; j < BN; ++j) o += s_smem[y * BN + j] * v_smem[j * D + c];
                out[(size_t)row * D + c] = o / l_new;
            }
            // The row's statistics have been read by all its threads, and so have the tiles.
            __syncthreads();
            if (x == 0 && row < n) {
                m[row] = m_new;
                l[row] = l_new;
            }
        }
    }
}
