/* rung
number = "07c"
title = "O3: double buffering and register blocking"
idea = """A warp owns ROWS query rows, so a key or value read once serves ROWS of them, and LANES sums over LANES \
lanes go through one butterfly of LANES - 1 shuffles. The next tile is on its way to registers while this one is \
used, and two buffers take a barrier away."""
source = "FlashSDPA-Mini, its roadmap, O3"
claim = "none"
arch = 60  # with NVRTC 12; NVRTC 13 begins at 75. No cp.async, and a block fits in 48 KiB
dtypes = ["float32"]
dims = [32, 64, 128]
causal = true
before = "07b"
expect = """A quarter of the shared loads and shuffles a score, and no long wait for the next tile (long-scoreboard \
stalls)."""
block = "32 * WARPS"
grid = "[cdiv(N, WARPS * ROWS), BH]"
shared = "4 * (4 * BN * (D + 4) + WARPS * ROWS * BN)"
workspace = "0"
[parameters]
WARPS = 4
ROWS = 4
BN = 32
[parameters.128]
BN = 16
[search]
WARPS = [2, 4, 8]
ROWS = [4]
BN = [16, 32]
*/

// Warp w of a block owns ROWS query rows. Its lanes form TEAMS of LANES = D / 4; a team takes STEP = LANES / ROWS keys
// at a time, and lane t of a team their channels 4t ... 4t + 3:
//
//   k_smem [2][BN][D + 4]                             v_smem [2][BN][D + 4]
//   STEP rows a team                                  rows g, g + TEAMS, ...
//   |                                                 |
//   q * k [LANES] -> butterfly -> p_smem [w][BN][ROWS] -> o [ROWS]: in registers, a sum for each team
//
// The butterfly leaves one of the team's LANES sums to each lane: lane t has row t % ROWS of key t / ROWS, so a lane's
// maximum and row sum belong to one row. The teams' outputs are added up at the end.

#define LOG2_E 1.4426950408889634f
#define MINUS_INFINITY __int_as_float(0xff800000)

constexpr int THREADS = 32 * WARPS, PITCH = D + 4, LANES = D / 4, TEAMS = 32 / LANES, STEP = LANES / ROWS;
constexpr int STAGE = BN * LANES / THREADS;  // float4 of a tile that a thread carries
static_assert(ROWS == 4, "the four rows' probabilities of a key are one float4");
static_assert(BN % (STEP * TEAMS) == 0 && BN * LANES % THREADS == 0, "whole steps, whole shares of a tile");

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

template <int FROM, int TO>
__device__ float lane_max(float x) {
    for (int lanes = FROM; lanes < TO; lanes *= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, lanes));
    return x;
}

// Sums COUNT numbers over COUNT lanes; lane t keeps sum t % COUNT. Each round a lane gives half of its numbers away.
template <int COUNT>
__device__ float butterfly(float* x, int t) {
    if constexpr (COUNT > 1) {
        constexpr int HALF = COUNT / 2;
        for (int i = 0; i < HALF; ++i) {
            const float keep = t & HALF ? x[i + HALF] : x[i];
            const float give = t & HALF ? x[i] : x[i + HALF];
            x[i] = keep + __shfl_xor_sync(~0u, give, HALF);
        }
        return butterfly<HALF>(x, t);
    }
    return x[0];
}

// A thread's share of rows [first, first + BN) of an (n, D) matrix, to registers; rows past the end become zeros.
__device__ void fetch(float4 (&share)[STAGE], const float* gmem, int first, int n) {
    for (int i = 0; i < STAGE; ++i) {
        const int at = threadIdx.x + i * THREADS, row = first + at / LANES;
        const float4 zero = {0.0f, 0.0f, 0.0f, 0.0f};
        share[i] = row < n ? vector(gmem + (size_t)row * D + at % LANES * 4) : zero;
    }
}

__device__ void store(float* smem, const float4 (&share)[STAGE]) {
    for (int i = 0; i < STAGE; ++i) {
        const int at = threadIdx.x + i * THREADS;
        vector(smem + at / LANES * PITCH + at % LANES * 4) = share[i];
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
    float* k_smem = smem;                     // [2][BN][D + 4]
    float* v_smem = k_smem + 2 * BN * PITCH;  // [2][BN][D + 4]
    const int w = threadIdx.x / 32, lane = threadIdx.x % 32, t = lane % LANES, g = lane / LANES;
    float* p_smem = v_smem + 2 * BN * PITCH + w * BN * ROWS;  // [BN][ROWS]

    const int row = (blockIdx.x * WARPS + w) * ROWS;
    const size_t head = (size_t)blockIdx.y * n * D;
    q += head, k += head, v += head, out += head;
    float4 q_rmem[ROWS];  // rows past the end compute and are not written
    for (int r = 0; r < ROWS; ++r)
        q_rmem[r] = times(softmax_scale * LOG2_E, vector(q + (size_t)min(row + r, n - 1) * D + 4 * t));

    float4 o[ROWS] = {}, k_share[STAGE], v_share[STAGE];
    float m = MINUS_INFINITY, l = 0.0f;  // of row lane % ROWS; l: of this lane's keys
    fetch(k_share, k, 0, n);
    fetch(v_share, v, 0, n);
    const int k_end = CAUSAL ? min(n, (blockIdx.x + 1) * WARPS * ROWS) : n;
    for (int k_first = 0, buffer = 0; k_first < k_end; k_first += BN, buffer ^= BN * PITCH) {
        store(k_smem + buffer, k_share);
        store(v_smem + buffer, v_share);
        // This tile is whole; the one before has been read, and its buffer may be overwritten.
        __syncthreads();
        if (k_first + BN < k_end) {
            fetch(k_share, k, k_first + BN, n);
            fetch(v_share, v, k_first + BN, n);
        }

        // Scores, in log2 units
        float s[BN / STEP / TEAMS], m_old = m;
        for (int i = 0; i < BN / STEP / TEAMS; ++i) {
            const int key = (i * TEAMS + g) * STEP;
            float x[LANES];
            for (int j = 0; j < STEP; ++j) {
                const float4 k_rmem = vector(k_smem + buffer + (key + j) * PITCH + 4 * t);
                for (int r = 0; r < ROWS; ++r) x[j * ROWS + r] = dot(q_rmem[r], k_rmem);
            }
            s[i] = butterfly<LANES>(x, t);
            if (!visible(row + t % ROWS, k_first + key + t / ROWS, n)) s[i] = MINUS_INFINITY;
            m = fmaxf(m, s[i]);
        }

        // Softmax
        m = lane_max<ROWS, 32>(m);
        const float alpha = exp2f(m_old - m);
        l *= alpha;
        for (int i = 0; i < BN / STEP / TEAMS; ++i) {
            const float p = exp2f(s[i] - m);
            p_smem[32 * i + lane] = p;
            l += p;
        }
        // The warp's probabilities are whole.
        __syncwarp();

        // Output
        for (int r = 0; r < ROWS; ++r) o[r] = times(__shfl_sync(~0u, alpha, r), o[r]);
        for (int j = g; j < BN + g; j += TEAMS) {
            const float4 p_rmem = vector(p_smem + j * ROWS), v_rmem = vector(v_smem + buffer + j * PITCH + 4 * t);
            add_times(o[0], p_rmem.x, v_rmem);
            add_times(o[1], p_rmem.y, v_rmem);
            add_times(o[2], p_rmem.z, v_rmem);
            add_times(o[3], p_rmem.w, v_rmem);
        }
        // The warp's probabilities have been read: they may be overwritten.
        __syncwarp();
    }

    l = lane_sum<ROWS, 32>(l);
    for (int r = 0; r < ROWS; ++r) {
        const float scale = 1.0f / __shfl_sync(~0u, l, r);
        const float4 sum = {lane_sum<LANES, 32>(o[r].x), lane_sum<LANES, 32>(o[r].y),
                            lane_sum<LANES, 32>(o[r].z), lane_sum<LANES, 32>(o[r].w)};
        if (g == 0 && row + r < n) vector(out + (size_t)(row + r) * D + 4 * t) = times(scale, sum);
    }
}
