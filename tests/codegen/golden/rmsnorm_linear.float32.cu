// rmsnorm_linear: RMSNorm and the linear layer after it, for the few rows of decoding; the weight is read once
//
// Reads the weight (3584 x 3584 float32, 51.4 MB) once, for 1 row of x.
// Sums in float32, rounded once, at the store.
// The norm's factor of a row is one for all its results: the squares are summed up along the way.
// Launch: cuda_fma rows=4 warps=4 unroll=1
// Origin: library kernel rmsnorm_linear, variant llama.
// Source: https://arxiv.org/abs/1910.07467

#ifndef M
#define M 1  // rows of x
#endif
#ifndef N
#define N 3584  // columns of the result
#endif
#ifndef K
#define K 3584  // columns of x and of the weight
#endif
#ifndef ROWS
#define ROWS 4  // rows of the weight for a block
#endif
#ifndef WARPS
#define WARPS 4  // warps of a block: they share the columns
#endif
#ifndef UNROLL
#define UNROLL 1  // loads of a thread from each row that are under way together
#endif
#ifndef VEC
#define VEC 4  // columns of one load
#endif
#ifdef WIDE_INDEX
typedef long long index_t;  // an index or an address passes 32 bits
#else
typedef int index_t;
#endif

// ---- helpers ----

template <int BYTES> struct Word { typedef uint4 type; };
template <> struct Word<8> { typedef uint2 type; };
template <> struct Word<4> { typedef unsigned type; };
template <> struct Word<2> { typedef unsigned short type; };
template <> struct Word<1> { typedef unsigned char type; };

// VEC neighbours in a row: one 16-byte access (or two). The launch sees to it that rows hold whole packs and are aligned.
template <typename T>
union Pack {
    typedef typename Word<sizeof(T) * VEC>::type word_t;
    word_t words[sizeof(T) * VEC / sizeof(word_t)];  // what is copied: two halves stay in one register
    T at[VEC];
    __device__ __forceinline__ T& operator[](int lane) { return at[lane]; }
    __device__ __forceinline__ const T& operator[](int lane) const { return at[lane]; }
};

// Zeros, unread, where it is not wanted.
template <typename T>
__device__ __forceinline__ Pack<T> load_pack(const T* from, bool is_wanted = true) {
    typedef typename Pack<T>::word_t word_t;
    Pack<T> pack;
    #pragma unroll
    for (int n = 0; n < sizeof(pack) / sizeof(word_t); ++n)
        pack.words[n] = is_wanted ? reinterpret_cast<const word_t*>(from)[n] : word_t{};
    return pack;
}

__device__ __forceinline__ unsigned long long stream_policy() {
    unsigned long long policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// What is read once passes by the L1 cache and is the first to leave the L2. Volatile: the loads stay in front of what does not
// wait for them, and next to each other.
template <typename T>
__device__ __forceinline__ Pack<T> stream_pack(const T* from, bool is_wanted, unsigned long long policy) {
    if constexpr (sizeof(T) * VEC != 16) {
        return load_pack(from, is_wanted);
    } else {
        Pack<T> pack;
        uint4& word = pack.words[0];
        word = uint4{0, 0, 0, 0};
        if (is_wanted)
            asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32 { %0, %1, %2, %3}, [%4], %5;"
                         : "=r"(word.x), "=r"(word.y), "=r"(word.z), "=r"(word.w) : "l"(from), "l"(policy));
        return pack;
    }
}

// Sum over neighbouring lanes of a warp, a power of two of them; always in the same order.
template <int LANES>
__device__ __forceinline__ float lanes_sum(float value) {
    #pragma unroll
    for (int distance = LANES / 2; distance > 0; distance /= 2) value += __shfl_xor_sync(0xffffffffu, value, distance);
    return value;
}

// ---- kernel ----

extern "C" __global__ void __launch_bounds__(WARPS * 32)
fa_rmsnorm_linear_99652c(
    const float* __restrict__ x,
    const float* __restrict__ norm_weight,
    const float* __restrict__ weight,
    float* __restrict__ out) {
    constexpr int LINES = ROWS;
    constexpr int TOKENS = 1;
    // The squares of x have the last column.
    __shared__ float partial[WARPS][TOKENS][LINES + 1];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int first = blockIdx.x * ROWS;
    const unsigned long long policy = stream_policy();

    const float* lines[LINES];
    #pragma unroll
    for (int line = 0; line < LINES; ++line)
        lines[line] = weight + (long long)(min(first + line % ROWS, N - 1) + line / ROWS * N) * K;
    float sums[M][LINES] = {};
    float squares[M] = {};

    #pragma unroll 1
    for (int start = threadIdx.x * VEC; start < K; start += UNROLL * WARPS * 32 * VEC) {
        // The weight's loads first, all of them: they take longest.
        Pack<float> tiles[UNROLL][LINES];
        #pragma unroll
        for (int step = 0; step < UNROLL; ++step) {
            const int at = start + step * WARPS * 32 * VEC;
            #pragma unroll
            for (int line = 0; line < LINES; ++line) tiles[step][line] = stream_pack(lines[line] + at, at < K, policy);
        }
        #pragma unroll
        for (int step = 0; step < UNROLL; ++step) {
            const int at = start + step * WARPS * 32 * VEC;
            const Pack<float> norm = load_pack(norm_weight + at, at < K);
            #pragma unroll
            for (int token = 0; token < M; ++token) {
                const Pack<float> tokens = load_pack(x + token * K + at, at < K);
                #pragma unroll
                for (int col = 0; col < VEC; ++col) {
                    const float value = (tokens[col]);
                    squares[token] = fmaf(value, value, squares[token]);
                    const float term = value * norm[col];
                    #pragma unroll
                    for (int line = 0; line < LINES; ++line)
                        sums[token][line] = fmaf(term, (tiles[step][line][col]), sums[token][line]);
                }
            }
        }
    }

    #pragma unroll
    for (int token = 0; token < M; ++token) {
        #pragma unroll
        for (int line = 0; line < LINES; ++line) {
            const float sum = lanes_sum<32>(sums[token][line]);
            if (lane == 0) partial[warp][token][line] = sum;
        }
        const float sum = lanes_sum<32>(squares[token]);
        if (lane == 0) partial[warp][token][LINES] = sum;
    }
    __syncthreads();

    // Warps are added in order: every run gives the same bits.
    const auto total = [&](int token, int line) {
        float sum = partial[0][token][line];
        #pragma unroll
        for (int other = 1; other < WARPS; ++other) sum += partial[other][token][line];
        return sum;
    };
    for (int place = threadIdx.x; place < M * ROWS; place += WARPS * 32) {
        const int token = place / ROWS, row = first + place % ROWS;
        if (row >= N) continue;
        float value = total(token, place % ROWS);
        const float scale = rsqrtf(total(token, LINES) * (1.0f / K) + 1e-06f);
        value *= scale;
        out[token * N + row] = (value);
    }
}
