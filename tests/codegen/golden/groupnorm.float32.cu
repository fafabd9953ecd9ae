// groupnorm: normalise groups of channels; a group's channels are read as one row
//
// Moves each operand once: x 4 B/element; weight 4 B/part of a row, the same for every i0; bias 4 B/part of a
// row, the same for every i0; out 4 B/element.
// Maths in float32, rounded once, at the store.
// Origin: library kernel groupnorm, variant builtin.
// Source: https://arxiv.org/abs/1803.08494

#ifndef THREADS
#define THREADS 256  // threads along a row
#endif
#ifndef ROWS
#define ROWS 1  // rows of a block; 1 when more than a warp shares a row
#endif
#ifndef PACKS
#define PACKS 4  // packs of a thread at a time
#endif
#ifndef VEC
#define VEC 4  // columns of a pack, a divisor of every row and stride
#endif
#ifndef FULL
#define FULL 0  // 1 where PACKS * THREADS * VEC divides cols
#endif
#ifndef STAGED
#define STAGED 0  // columns that stay in dynamic shared memory, a multiple of 16
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

template <typename T>
__device__ __forceinline__ void store_pack(T* to, const Pack<T>& pack) {
    typedef typename Pack<T>::word_t word_t;
    #pragma unroll
    for (int n = 0; n < sizeof(pack) / sizeof(word_t); ++n) reinterpret_cast<word_t*>(to)[n] = pack.words[n];
}

// Rounded as IEEE division rounds, by Markstein (1990): the product with the reciprocal, which is a constant where the launch knows
// the count, and a correction by what it leaves over. The division itself is 14 instructions and a call.
__device__ __forceinline__ float mean_of(float total, float count) {
    const float inverse = 1.0f / count, mean = __fmul_rn(total, inverse);  // no fused difference may take it unrounded
    const float rounded = fmaf(fmaf(-mean, count, total), inverse, mean);
    return mean - mean == 0.0f ? rounded : mean;  // infinity leaves NaN over
}

struct Sum {
    template <typename T>
    __device__ T operator()(T a, T b) const { return a + b; }
};

// Combines one number per thread over a row's threads; every thread gets the result. Each call has its own number, and with
// it its own shared memory: no reader of an earlier one has to be waited for.
template <typename Combine, int NUMBER, typename T>
__device__ __forceinline__ T row_reduce(T value) {
    const Combine combine;
    constexpr int lanes = THREADS < 32 ? THREADS : 32, warps = THREADS / lanes;
    #pragma unroll
    for (int distance = lanes / 2; distance > 0; distance /= 2) value = combine(value, __shfl_xor_sync(0xffffffffu, value, distance));
    if (warps > 1) {
        __shared__ T partial[warps];
        if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = value;
        __syncthreads();
        if (warps >= 8 && (warps & (warps - 1)) == 0) {
            value = partial[threadIdx.x % warps];
            #pragma unroll
            for (int distance = warps / 2; distance > 0; distance /= 2)
                value = combine(value, __shfl_xor_sync(0xffffffffu, value, distance));
        } else {
            value = partial[0];
            #pragma unroll
            for (int warp = 1; warp < warps; ++warp) value = combine(value, partial[warp]);
        }
    }
    return value;
}

// Of some numbers: how many, their sum and mean, and what their squared distances from that mean add up to.
template <typename T>
struct Moments {
    T count, sum, mean, squares;
    __device__ __forceinline__ void set_mean() { mean = count > 0 ? sum / count : 0; }
    __device__ __forceinline__ T squares_about(T other) const { return squares + count * (mean - other) * (mean - other); }
};

// Of two sets what both are together, by Chan, Golub and LeVeque (1979).
template <typename T>
__device__ __forceinline__ Moments<T> merged(const Moments<T>& a, const Moments<T>& b) {
    if (b.count == 0) return a;
    const T share = b.count / (a.count + b.count), deviation = b.mean - a.mean;
    return {a.count + b.count, a.sum + b.sum, a.mean + deviation * share, a.squares + b.squares + a.count * share * deviation * deviation};
}

// ---- kernel ----

extern "C" __global__ void __launch_bounds__(THREADS * ROWS)
fa_groupnorm_a2e130(
    const float* __restrict__ x_ptr,
    const float* __restrict__ weight_ptr,
    const float* __restrict__ bias_ptr,
    float* __restrict__ out_ptr,
    index_t rows,
    index_t size1,
    index_t cols,
    index_t x_stride0,
    index_t x_stride1,
    index_t weight_extent,
    index_t weight_stride1,
    index_t bias_stride1,
    index_t out_stride0,
    index_t out_stride1) {
#ifdef SIZE1
    __builtin_assume(size1 == SIZE1);  // dividing by what is known takes a few instructions, not twenty
#endif
#ifdef WEIGHT_EXTENT
    __builtin_assume(weight_extent == WEIGHT_EXTENT);
#endif
    const index_t row = (index_t)blockIdx.x * ROWS + threadIdx.y;
    if (ROWS > 1 && row >= rows) return;
    const index_t i1 = row % size1;
    const index_t i0 = row / size1;
    const float* const x_row = x_ptr + i0 * x_stride0 + i1 * x_stride1;
    float* const out_row = out_ptr + i0 * out_stride0 + i1 * out_stride1;
    extern __shared__ uint4 staged[];
    float* const x_staged = (float*)staged;
    const float eps = 1e-05f;
    constexpr index_t step = PACKS * THREADS * VEC;

    Moments<float> x_seen = {};
    for (index_t start = 0; start < cols; start += step) {
        Pack<float> x_packs[PACKS];
        #pragma unroll
        for (int p = 0; p < PACKS; ++p) {
            const index_t first = start + ((index_t)p * THREADS + threadIdx.x) * VEC;
            const bool is_inside = FULL || first < cols;
            x_packs[p] = load_pack(x_row + first, is_inside);
        }
        #pragma unroll
        for (int p = 0; p < PACKS; ++p) {
            const index_t first = start + ((index_t)p * THREADS + threadIdx.x) * VEC;
            if (first >= STAGED) continue;
            store_pack(x_staged + first, x_packs[p]);
        }
        Moments<float> x_step = {};
        #pragma unroll
        for (int p = 0; p < PACKS; ++p) {
            const index_t first = start + ((index_t)p * THREADS + threadIdx.x) * VEC;
            const bool is_inside = FULL || first < cols;
            if (!is_inside) continue;
            #pragma unroll
            for (int lane = 0; lane < VEC; ++lane) {
                const float x = x_packs[p][lane];
                x_step.sum += x;
            }
            x_step.count += VEC;
        }
        x_step.set_mean();
        #pragma unroll
        for (int p = 0; p < PACKS; ++p) {
            const index_t first = start + ((index_t)p * THREADS + threadIdx.x) * VEC;
            const bool is_inside = FULL || first < cols;
            if (!is_inside) continue;
            #pragma unroll
            for (int lane = 0; lane < VEC; ++lane) {
                const float x = x_packs[p][lane];
                const float x_deviation = x - x_step.mean;
                x_step.squares += x_deviation * x_deviation;
            }
        }
        x_seen = merged(x_seen, x_step);
    }
    const float x_sum = row_reduce<Sum, 0>(x_seen.sum);
    const float x_mean = mean_of(x_sum, (float)cols);
    const float x_centered_squared_sum = row_reduce<Sum, 1>(x_seen.squares_about(x_mean));
    const float x_variance_eps = mean_of(x_centered_squared_sum, (float)cols) + eps;
    const float inverse_deviation = rsqrtf(x_variance_eps);

    for (index_t start = (cols - 1) / step * step; start >= 0; start -= step) {  // backwards: what was read last is near
        Pack<float> x_packs[PACKS];
        #pragma unroll
        for (int p = 0; p < PACKS; ++p) {
            const index_t first = start + ((index_t)p * THREADS + threadIdx.x) * VEC;
            const bool is_inside = FULL || first < cols;
            x_packs[p] = first < STAGED ? load_pack(x_staged + first)
                : load_pack(x_row + first, is_inside);
        }
        #pragma unroll
        for (int p = 0; p < PACKS; ++p) {
            const index_t first = start + ((index_t)p * THREADS + threadIdx.x) * VEC;
            const bool is_inside = FULL || first < cols;
            if (!is_inside) continue;
            Pack<float> out_pack;
            const index_t part = first / weight_extent;
            const float weight = weight_ptr[part + i1 * weight_stride1];
            const float bias = bias_ptr[part + i1 * bias_stride1];
            #pragma unroll
            for (int lane = 0; lane < VEC; ++lane) {
                const float x = x_packs[p][lane];
                const float x_centered = x - x_mean;
                const float out = x_centered * inverse_deviation * weight + bias;
                out_pack[lane] = out;
            }
            store_pack(out_row + first, out_pack);
        }
    }
}
