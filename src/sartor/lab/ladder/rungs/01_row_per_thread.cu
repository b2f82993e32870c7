/* rung
number = "01"
title = "One thread per row"
idea = """A block walks over one head: K/V tiles outside, query tiles inside, one thread per query row. Scores never \
reach device memory; row maximum, row sum and output do, once per tile pair."""
source = "The fp32 CUDA ladder, kernel 1; FlashAttention (Dao et al. 2022), algorithm 1"
claim = "1122 ms, 0.37 TFLOP/s on an RTX A6000 (B=8 H=12 N=4096 D=64)"
arch = 75
dtypes = ["float32"]
dims = [32, 64, 128]
causal = true
before = ""
expect = """The slowest rung: one warp per head leaves the card idle (achieved occupancy), and neighbouring threads \
read addresses a whole row apart (sectors per request)."""
block = "BM"
grid = "[BH]"
shared = "4 * (3 * BM * D + BM * BM)"
workspace = "2 * BH * N"
[parameters]
BM = 32
*/

// Thread t of a block owns row t of every query tile of its head:
//
//                 k_smem, v_smem [BM][D]
//                 a tile of keys stays ...
//   q_smem [BM][D]      |
//   row t  ->  s_smem [BM][BM], row t  ->  out, m, l: row t, read and written in device memory
//   ... while all query tiles pass by

#define LOG2_E 1.4426950408889634f
#define MINUS_INFINITY __int_as_float(0xff800000)

__device__ bool visible(int row, int key, int n) { return key < n && (!CAUSAL || key <= row); }

extern "C" __global__ void __launch_bounds__(BM) rung(
    const float* q,  // (heads, n, D)
    const float* k,  // (heads, n, D)
    const float* v,  // (heads, n, D)
    float* out,      // (heads, n, D)
    float* workspace,  // (2, heads, n): row maximum in log2 units, row sum
    int heads, int n, float softmax_scale) {
    extern __shared__ float smem[];
    float* q_smem = smem;              // [BM][D]
    float* k_smem = q_smem + BM * D;   // [BM][D]
    float* v_smem = k_smem + BM * D;   // [BM][D]
    float* s_smem = v_smem + BM * D;   // [BM][BM]

    const int t = threadIdx.x;
    const size_t head = (size_t)blockIdx.x * n;
    q += head * D, k += head * D, v += head * D, out += head * D;
    float* m = workspace + head;
    float* l = workspace + (size_t)heads * n + head;

    for (int k_first = 0; k_first < n; k_first += BM) {
        // The tile before has been read by every thread: it may be overwritten.
        __syncthreads();
        for (int c = 0; c < D; ++c) {
            const int key = k_first + t;
            k_smem[t * D + c] = key < n ? k[(size_t)key * D + c] : 0.0f;
            v_smem[t * D + c] = key < n ? v[(size_t)key * D + c] : 0.0f;
        }
        // Keys and values are whole.
        __syncthreads();

        for (int row = (CAUSAL ? k_first : 0) + t; row < n; row += BM) {
            for (int c = 0; c < D; ++c) q_smem[t * D + c] = q[(size_t)row * D + c] * (softmax_scale * LOG2_E);

            // Scores of one row, in log2 units
            const float m_old = k_first ? m[row] : MINUS_INFINITY;
            float m_new = m_old;
            for (int j = 0; j < BM; ++j) {
                float s = 0.0f;
                for (int c = 0; c < D; ++c) s += q_smem[t * D + c] * k_smem[j * D + c];
                if (!visible(row, k_first + j, n)) s = MINUS_INFINITY;
                s_smem[t * BM + j] = s;
                m_new = fmaxf(m_new, s);
            }

            // Softmax; what was summed up so far shrinks by exp2(m_old - m_new)
            const float l_old = k_first ? l[row] * exp2f(m_old - m_new) : 0.0f;
            float l_new = l_old;
            for (int j = 0; j < BM; ++j) {
                const float p = exp2f(s_smem[t * BM + j] - m_new);
                s_smem[t * BM + j] = p;
                l_new += p;
            }

            // Output, normalised after every tile
            for (int c = 0; c < D; ++c) {
                float o = k_first ? l_old * out[(size_t)row * D + c] : 0.0f;
                for (int j = 0; j < BM; ++j) o += s_smem[t * BM + j] * v_smem[j * D + c];
                out[(size_t)row * D + c] = o / l_new;
            }
            m[row] = m_new;
            l[row] = l_new;
        }
    }
}
