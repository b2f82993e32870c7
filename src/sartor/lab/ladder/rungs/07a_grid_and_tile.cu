/* rung
number = "07a"
title = "O1: grid and tile width"
idea = """The same code with more rows a block and narrower tiles: a K/V tile that is brought on chip serves WARPS \
rows instead of two, and less shared memory a block lets more blocks share an SM."""
source = "FlashSDPA-Mini, its roadmap, O1"
claim = "none: the roadmap only advises tiles of 32 keys on Pascal"
arch = 60  # with NVRTC 12; NVRTC 13 begins at 75. No cp.async, and a block fits in 48 KiB
dtypes = ["float32"]
dims = [32, 64, 128]
causal = true
before = "07"
expect = """A quarter of the bytes from L2 and of the barriers a row, and several times the warps an SM (achieved \
occupancy)."""
block = "32 * WARPS"
grid = "[cdiv(N, WARPS), BH]"
shared = "4 * (2 * BN * (D + 1) + WARPS * BN)"
workspace = "0"
[parameters]
WARPS = 16
BN = 32
[search]
WARPS = [2, 4, 8, 16]
BN = [32, 64]
*/

// Warp w of a block owns one query row; lane t owns its channels t, t + 32, ...:
//
//   k_smem [BN][D + 1]                              v_smem [BN][D + 1]
//   row j, channels t, t + 32, ...                  row j, channels t, t + 32, ...
//   |                                               |
//   q * k  -> sum over the lanes -> p_smem [w][j] -> o: in registers
//
// One score after another; lane 0 writes it.

#define LOG2_E 1.4426950408889634f
#define MINUS_INFINITY __int_as_float(0xff800000)

constexpr int THREADS = 32 * WARPS, PITCH = D + 1;
static_assert(BN % 32 == 0, "the softmax takes a key a lane");

__device__ bool visible(int row, int key, int n) { return key < n && (!CAUSAL || key <= row); }

__device__ float warp_sum(float x) {
    for (int lanes = 16; lanes; lanes /= 2) x += __shfl_xor_sync(~0u, x, lanes);
    return x;
}

__device__ float warp_max(float x) {
    for (int lanes = 16; lanes; lanes /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, lanes));
    return x;
}

// Rows [first, first + BN) of an (n, D) matrix; rows past the end become zeros.
__device__ void load_tile(float* smem, const float* gmem, int first, int n) {
    for (int i = threadIdx.x; i < BN * D; i += THREADS) {
        const int row = i / D, c = i % D;
        smem[row * PITCH + c] = first + row < n ? gmem[(size_t)(first + row) * D + c] : 0.0f;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) rung(
    const float* q,  // (heads, n, D)
    const float* k,  // (heads, n, D)
    const float* v,  // (heads, n, D)
    float* out,      // (heads, n, D)
    float* workspace,  // not used
    int heads, int n, float softmax_scale) {
    extern __shared__ float smem[];
    float* k_smem = smem;                 // [BN][D + 1]
    float* v_smem = k_smem + BN * PITCH;  // [BN][D + 1]
    const int t = threadIdx.x % 32, w = threadIdx.x / 32;
    float* p_smem = v_smem + BN * PITCH + w * BN;  // [BN]

    const int row = blockIdx.x * WARPS + w;
    const size_t head = (size_t)blockIdx.y * n * D;
    q += head, k += head, v += head, out += head;
    const float* q_row = q + (size_t)min(row, n - 1) * D;  // rows past the end compute and are not written

    float o[D / 32] = {}, m = MINUS_INFINITY, l = 0.0f;
    const int k_end = CAUSAL ? min(n, (blockIdx.x + 1) * WARPS) : n;
    for (int k_first = 0; k_first < k_end; k_first += BN) {
        load_tile(k_smem, k, k_first, n);
        load_tile(v_smem, v, k_first, n);
        // Keys and values are whole.
        __syncthreads();

        // Scores, in log2 units
        for (int j = 0; j < BN; ++j) {
            float s = 0.0f;
            for (int c = 0; c < D; c += 32) s += q_row[c + t] * k_smem[j * PITCH + c + t];
            s = warp_sum(s) * (softmax_scale * LOG2_E);
            if (t == 0) p_smem[j] = visible(row, k_first + j, n) ? s : MINUS_INFINITY;
        }
        // The warp's scores are whole.
        __syncwarp();

        // Softmax: a lane takes every 32nd key
        const float m_old = m;
        for (int j = 0; j < BN; j += 32) m = fmaxf(m, p_smem[j + t]);
        m = warp_max(m);
        const float alpha = exp2f(m_old - m);
        l *= alpha;
        for (int j = 0; j < BN; j += 32) {
            p_smem[j + t] = exp2f(p_smem[j + t] - m);
            l += p_smem[j + t];
        }
        // The warp's probabilities are whole.
        __syncwarp();

        // Output
        for (int c = 0; c < D / 32; ++c) {
            o[c] *= alpha;
            for (int j = 0; j < BN; ++j) o[c] += p_smem[j] * v_smem[j * PITCH + t + 32 * c];
        }
        // The tiles have been read: they may be overwritten.
        __syncthreads();
    }

    l = warp_sum(l);
    for (int c = 0; c < D / 32 && row < n; ++c) out[(size_t)row * D + t + 32 * c] = o[c] / l;
}
