/* rung
number = "07b"
title = "O2: float4 and cached Q"
idea = """A lane holds four neighbouring channels, so D / 4 lanes compute a score and a warp computes 128 / D at \
once; loads are 128 bits wide, global and shared; q waits in registers (where the compiler had kept it already), \
scaled."""
source = "FlashSDPA-Mini, its roadmap, O2"
claim = "none"
arch = 60  # with NVRTC 12; NVRTC 13 begins at 75. No cp.async, and a block fits in 48 KiB
dtypes = ["float32"]
dims = [32, 64, 128]
causal = true
before = "07a"
expect = """A quarter of the load instructions, none for q, and fewer shuffles for a score where D < 128 \
(instructions executed, MIO stalls)."""
block = "32 * WARPS"
grid = "[cdiv(N, WARPS), BH]"
shared = "4 * (2 * BN * (D + 4) + WARPS * BN)"
workspace = "0"
[parameters]
WARPS = 16
BN = 32
*/

// Warp w of a block owns one query row. Its lanes form TEAMS of D / 4; team g takes the keys g, g + TEAMS, ..., and
// lane t of a team the channels 4t ... 4t + 3:
//
//   k_smem [BN][D + 4]                              v_smem [BN][D + 4]
//   rows g, g + TEAMS, ...                          rows g, g + TEAMS, ...
//   |                                               |
//   q * k  -> sum over the team -> p_smem [w][j] ->  o: in registers, a sum for each team
//
// Lane 0 of a team writes its scores; the teams' outputs are added up at the end.

#define LOG2_E 1.4426950408889634f
#define MINUS_INFINITY __int_as_float(0xff800000)

constexpr int THREADS = 32 * WARPS, PITCH = D + 4, LANES = D / 4, TEAMS = 32 / LANES;
static_assert(BN % 32 == 0, "the softmax takes a key a lane");

__device__ bool visible(int row, int key, int n) { return key < n && (!CAUSAL || key <= row); }

__device__ float4& vector(float* p) { return *reinterpret_cast<float4*>(p); }
__device__ float4 vector(const float* p) { return *reinterpret_cast<const float4*>(p); }
__device__ float4 times(float a, float4 b) { return {a * b.x, a * b.y, a * b.z, a * b.w}; }
__device__ float dot(float4 a, float4 b) { return a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w; }
__device__ void add_times(float4& o, float a, float4 b) {
    o.x += a * b.x, o.y += a * b.y, o.z += a * b.z, o.w += a * b.w;
}

// Sum over the lanes whose numbers differ in the bits FROM ... TO / 2.
template <int FROM, int TO>
__device__ float lane_sum(float x) {
    for (int lanes = FROM; lanes < TO; lanes *= 2) x += __shfl_xor_sync(~0u, x, lanes);
    return x;
}

__device__ float warp_max(float x) {
    for (int lanes = 16; lanes; lanes /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, lanes));
    return x;
}

// Rows [first, first + BN) of an (n, D) matrix; rows past the end become zeros.
__device__ void load_tile(float* smem, const float* gmem, int first, int n) {
    for (int i = threadIdx.x * 4; i < BN * D; i += THREADS * 4) {
        const int row = i / D, c = i % D;
        const float4 zero = {0.0f, 0.0f, 0.0f, 0.0f};
        vector(smem + row * PITCH + c) = first + row < n ? vector(gmem + (size_t)(first + row) * D + c) : zero;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) rung(
    const float* q,  // (heads, n, D)
    const float* k,  // (heads, n, D)
    const float* v,  // (heads, n, D)
    float* out,      // (heads, n, D)
    float* workspace,  // not used
    int heads, int n, float softmax_scale) {
    extern __shared__ __align__(16) float smem[];
    float* k_smem = smem;                 // [BN][D + 4]
    float* v_smem = k_smem + BN * PITCH;  // [BN][D + 4]
    const int w = threadIdx.x / 32, lane = threadIdx.x % 32, t = lane % LANES, g = lane / LANES;
    float* p_smem = v_smem + BN * PITCH + w * BN;  // [BN]

    const int row = blockIdx.x * WARPS + w;
    const size_t head = (size_t)blockIdx.y * n * D;
    q += head, k += head, v += head, out += head;
    // Rows past the end compute and are not written.
    const float4 q_rmem = times(softmax_scale * LOG2_E, vector(q + (size_t)min(row, n - 1) * D + 4 * t));

    float4 o = {};
    float m = MINUS_INFINITY, l = 0.0f;
    const int k_end = CAUSAL ? min(n, (blockIdx.x + 1) * WARPS) : n;
    for (int k_first = 0; k_first < k_end; k_first += BN) {
        load_tile(k_smem, k, k_first, n);
        load_tile(v_smem, v, k_first, n);
        // Keys and values are whole.
        __syncthreads();

        // Scores, in log2 units
        for (int j = 0; j < BN; j += TEAMS) {
            const float s = lane_sum<1, LANES>(dot(q_rmem, vector(k_smem + (j + g) * PITCH + 4 * t)));
            if (t == 0) p_smem[j + g] = visible(row, k_first + j + g, n) ? s : MINUS_INFINITY;
        }
        // The warp's scores are whole.
        __syncwarp();

        // Softmax: a lane takes every 32nd key
        const float m_old = m;
        for (int j = 0; j < BN; j += 32) m = fmaxf(m, p_smem[j + lane]);
        m = warp_max(m);
        const float alpha = exp2f(m_old - m);
        l *= alpha;
        for (int j = 0; j < BN; j += 32) {
            p_smem[j + lane] = exp2f(p_smem[j + lane] - m);
            l += p_smem[j + lane];
        }
        // The warp's probabilities are whole.
        __syncwarp();

        // Output
        o = times(alpha, o);
        for (int j = 0; j < BN; j += TEAMS) add_times(o, p_smem[j + g], vector(v_smem + (j + g) * PITCH + 4 * t));
        // The tiles have been read: they may be overwritten.
        __syncthreads();
    }

    l = lane_sum<1, 32>(l);
    o = {lane_sum<LANES, 32>(o.x), lane_sum<LANES, 32>(o.y), lane_sum<LANES, 32>(o.z), lane_sum<LANES, 32>(o.w)};
    if (g == 0 && row < n) vector(out + (size_t)row * D + 4 * t) = times(1.0f / l, o);
}
