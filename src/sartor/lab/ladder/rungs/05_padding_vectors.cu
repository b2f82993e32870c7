/* rung
number = "05"
title = "Padding, 128-bit loads, chunks of the head dim"
idea = """Rows in shared memory are padded, so that the threads of a warp meet different banks; loads, global and \
shared, are 128 bits wide, and neighbouring threads share their addresses; keys and values pass through one buffer \
in chunks of DK channels, so that more blocks fit an SM."""
source = "The fp32 CUDA ladder, kernel 5"
claim = "21.7 ms, 19.02 TFLOP/s on an RTX A6000: 1.7x over kernel 4, 111 % of SDPA"
arch = 75
dtypes = ["float32"]
dims = [32, 64, 128]
causal = true
before = "04"
expect = """No bank conflicts in the loops of both products (shared-memory wavefronts a request), a quarter of the \
load instructions, half the shared memory a block."""
block = "(BM // TM) * (BN // TN)"
grid = "[cdiv(N, BM), BH]"
shared = "4 * (BM * (D + 4) + BN * (DK + 4) + BM * (BN + BN // TN))"
workspace = "0"
[parameters]
BM = 32
BN = 32
TM = 4
TN = 4
DK = 32
*/

// Thread (y, x) of Y x X owns TM x TN scores and TM x TD outputs. Rows, keys and channels are dealt out in turn,
// channels by fours:
//
//                         kv_smem [BN][DK + 4]: keys      kv_smem [BN][DK + 4]: values
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
constexpr int Q_PITCH = D + 4, KV_PITCH = DK + 4, P_PITCH = BN + X;
static_assert(32 % (2 * X) == 0, "the threads of two rows must share a warp");
static_assert(THREADS % 32 == 0 && DK % (4 * X) == 0 && D % DK == 0, "a thread needs whole float4 of every chunk");

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

// Rows [first, first + ROWS) and COLUMNS channels of an (n, D) matrix, times a factor; rows past the end become zeros.
template <int ROWS, int COLUMNS>
__device__ void load_tile(float* smem, const float* gmem, int first, int n, float factor) {
    const int c = threadIdx.x % (COLUMNS / 4) * 4;
    for (int i = threadIdx.x / (COLUMNS / 4); i < ROWS; i += THREADS / (COLUMNS / 4)) {
        float4 t = {0.0f, 0.0f, 0.0f, 0.0f};
        if (first + i < n) t = vector(gmem + (size_t)(first + i) * D + c);
        vector(smem + i * (COLUMNS + 4) + c) = times(factor, t);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) rung(
    const float* q,  // (heads, n, D)
    const float* k,  // (heads, n, D)
    const float* v,  // (heads, n, D)
    float* out,      // (heads, n, D)
    float* workspace,  // not used
    int heads, int n, float softmax_scale) {
    extern __shared__ __align__(16) float smem[];
    float* q_smem = smem;                       // [BM][D + 4]
    float* kv_smem = q_smem + BM * Q_PITCH;     // [BN][DK + 4]
    float* p_smem = kv_smem + BN * KV_PITCH;    // [BM][BN + X]

    const int x = threadIdx.x / 2 % X, y = threadIdx.x / (2 * X) * 2 + threadIdx.x % 2;
    const int q_first = blockIdx.x * BM;
    const size_t head = (size_t)blockIdx.y * n * D;
    q += head, k += head, v += head, out += head;

    load_tile<BM, D>(q_smem, q, q_first, n, softmax_scale * LOG2_E);
    float4 o[TM][TD / 4] = {};
    float m[TM], l[TM] = {};  // l: of this thread's keys
    for (int i = 0; i < TM; ++i) m[i] = MINUS_INFINITY;

    const int k_end = CAUSAL ? min(n, q_first + BM) : n;
    for (int k_first = 0; k_first < k_end; k_first += BN) {
        // Scores, in log2 units: four channels at a time
        float s[TM][TN] = {};
        for (int chunk = 0; chunk < D; chunk += DK) {
            load_tile<BN, DK>(kv_smem, k + chunk, k_first, n, 1.0f);
            // This chunk of the keys is whole.
            __syncthreads();
#pragma unroll 2
            for (int c = 0; c < DK; c += 4) {
                float4 k_rmem[TN];
                for (int j = 0; j < TN; ++j) k_rmem[j] = vector(kv_smem + (x + X * j) * KV_PITCH + c);
                for (int i = 0; i < TM; ++i) {
                    const float4 q_rmem = vector(q_smem + (y + Y * i) * Q_PITCH + chunk + c);
                    for (int j = 0; j < TN; ++j) add_dot(s[i][j], q_rmem, k_rmem[j]);
                }
            }
            // The chunk has been read: it may be overwritten.
            __syncthreads();
        }

        // Softmax: the maximum over the X threads of a row by shuffles
        for (int i = 0; i < TM; ++i) {
            const float m_old = m[i];
            for (int j = 0; j < TN; ++j) {
                if (!visible(q_first + y + Y * i, k_first + x + X * j, n)) s[i][j] = MINUS_INFINITY;
                m[i] = fmaxf(m[i], s[i][j]);
            }
            for (int lanes = X; lanes > 1; lanes /= 2) m[i] = fmaxf(m[i], __shfl_xor_sync(~0u, m[i], lanes));
            const float alpha = exp2f(m_old - m[i]);
            l[i] *= alpha;
            for (int j = 0; j < TN; ++j) {
                const float p = exp2f(s[i][j] - m[i]);
                p_smem[(y + Y * i) * P_PITCH + x + X * j] = p;
                l[i] += p;
            }
            for (int c = 0; c < TD / 4; ++c) o[i][c] = times(alpha, o[i][c]);
        }
        // The warp's probabilities are whole.
        __syncwarp();

        // Output: four keys at a time
#pragma unroll
        for (int chunk = 0; chunk < D; chunk += DK) {
            load_tile<BN, DK>(kv_smem, v + chunk, k_first, n, 1.0f);
            // This chunk of the values is whole.
            __syncthreads();
#pragma unroll 2
            for (int j = 0; j < BN; j += 4) {
                float4 v_rmem[4][DK / X / 4];
                for (int e = 0; e < 4; ++e)
                    for (int c = 0; c < DK / X / 4; ++c)
                        v_rmem[e][c] = vector(kv_smem + (j + e) * KV_PITCH + 4 * (x + X * c));
                for (int i = 0; i < TM; ++i) {
                    const float4 p_rmem = vector(p_smem + (y + Y * i) * P_PITCH + j);
                    for (int c = 0; c < DK / X / 4; ++c) {
                        float4& o_rmem = o[i][chunk / X / 4 + c];
                        add_times(o_rmem, p_rmem.x, v_rmem[0][c]);
                        add_times(o_rmem, p_rmem.y, v_rmem[1][c]);
                        add_times(o_rmem, p_rmem.z, v_rmem[2][c]);
                        add_times(o_rmem, p_rmem.w, v_rmem[3][c]);
                    }
                }
            }
            // The chunk has been read: it may be overwritten.
            __syncthreads();
        }
    }

    for (int i = 0; i < TM; ++i) {
        for (int lanes = X; lanes > 1; lanes /= 2) l[i] += __shfl_xor_sync(~0u, l[i], lanes);
        const int row = q_first + y + Y * i;
        for (int c = 0; c < TD / 4 && row < n; ++c)
            vector(out + (size_t)row * D + 4 * (x + X * c)) = times(1.0f / l[i], o[i][c]);
    }
}
