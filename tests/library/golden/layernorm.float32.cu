// layernorm: (x - mean) / std * weight + bias over the last dim, the row read once
//
// Moves each operand once: x 4 B/element, weight 4 B/column, bias 4 B/column, out 4 B/element.
// Maths in float32, rounded once, at the store.
// Origin: library kernel layernorm, variant builtin.
// Source: https://arxiv.org/abs/1607.06450

#ifndef THREADS
#define THREADS 256  // threads along a row
#endif
#ifndef ROWS
#define ROWS 1  // rows of a block; 1 when more than a warp shares a row
#endif
#ifndef PACKS
#define PACKS 4  // packs of a thread: PACKS * THREADS * VEC >= cols
#endif
#ifndef VEC
#define VEC 4  // columns of a pack, a divisor of every row and stride
#endif
#ifndef FULL
#define FULL 0  // 1 where PACKS * THREADS * VEC divides cols
#endif
#ifdef WIDE_INDEX
typedef long long index_t;  // an index or an address passes 32 bits
#else
typedef int index_t;
#endif

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

// Of some numbers: how many, their sum and mean, and their squared distances from that mean.
template <typename T>
struct Moments {
    T count, sum, mean, squares;
    __device__ __forceinline__ void set_mean() { mean = count > 0 ? sum / count : 0; }
};

// Combines those of a row's threads, of ``cols`` columns together, by Chan, Golub and LeVeque (1979): the squares of all are those of
// each plus its count times its mean's squared distance from the mean of all. Only sum and squares of the result are set.
template <int NUMBER, typename T>
__device__ __forceinline__ Moments<T> row_moments(Moments<T> part, T cols) {
    if (FULL) {
        // Of two sets of one size the distance between the means follows from the sums: both are exchanged at once.
        T inverse = 1 / part.count;
        #pragma unroll
        for (int distance = 16; distance > 0; distance /= 2) {
            const T sum = __shfl_xor_sync(0xffffffffu, part.sum, distance), apart = (part.sum - sum) * inverse;
            const T squares = part.squares + __shfl_xor_sync(0xffffffffu, part.squares, distance);
            part.squares = squares + part.count / 2 * apart * apart;
            part.sum += sum;
            part.count *= 2;
            inverse /= 2;
        }
        part.mean = part.sum * inverse;
    } else {
        const T count = part.count, mean = part.mean;
        #pragma unroll
        for (int distance = 16; distance > 0; distance /= 2) {
            part.count += __shfl_xor_sync(0xffffffffu, part.count, distance);
            part.sum += __shfl_xor_sync(0xffffffffu, part.sum, distance);
        }
        part.set_mean();
        part.squares += count * (mean - part.mean) * (mean - part.mean);
        #pragma unroll
        for (int distance = 16; distance > 0; distance /= 2)
            part.squares += __shfl_xor_sync(0xffffffffu, part.squares, distance);
    }
    if (THREADS > 32) {
        __shared__ T counts[THREADS / 32], sums[THREADS / 32], means[THREADS / 32], squares[THREADS / 32];
        if (threadIdx.x % 32 == 0) {
            const int warp = threadIdx.x / 32;
            if (!FULL) counts[warp] = part.count;
            sums[warp] = part.sum;
            means[warp] = part.mean;
            squares[warp] = part.squares;
        }
        __syncthreads();
        part.sum = sums[0];
        #pragma unroll
        for (int warp = 1; warp < THREADS / 32; ++warp) part.sum += sums[warp];
        const T mean = part.sum / cols;
        part.squares = 0;
        #pragma unroll
        for (int warp = 0; warp < THREADS / 32; ++warp) {
            const T apart = means[warp] - mean;
            part.squares += squares[warp] + (FULL ? part.count : counts[warp]) * apart * apart;
        }
    }
    return part;
}

extern "C" __global__ void __launch_bounds__(THREADS * ROWS)
fa_layernorm_0681e9(
    const float* __restrict__ x_ptr,
    const float* __restrict__ weight_ptr,
    const float* __restrict__ bias_ptr,
    float* __restrict__ out_ptr,
    index_t rows,
    index_t cols,
    index_t x_stride0,
    index_t out_stride0) {
    const index_t row = (index_t)blockIdx.x * ROWS + threadIdx.y;
    if (row >= rows) return;
    const float eps = 1e-05f;
    Pack<float> x_packs[PACKS];
    Pack<float> weight_packs[PACKS];
    Pack<float> bias_packs[PACKS];
    #pragma unroll
    for (int p = 0; p < PACKS; ++p) {
        const index_t first = ((index_t)p * THREADS + threadIdx.x) * VEC;
        const bool is_inside = FULL || first < cols;
        x_packs[p] = load_pack(x_ptr + row * x_stride0 + first, is_inside);
        weight_packs[p] = load_pack(weight_ptr + first, is_inside);
        bias_packs[p] = load_pack(bias_ptr + first, is_inside);
    }

    Moments<float> x_sum_part = {};
    #pragma unroll
    for (int p = 0; p < PACKS; ++p) {
        const index_t first = ((index_t)p * THREADS + threadIdx.x) * VEC;
        const bool is_inside = FULL || first < cols;
        if (!is_inside) continue;
        #pragma unroll
        for (int lane = 0; lane < VEC; ++lane) {
            const float x = x_packs[p][lane];
            x_sum_part.sum += x;
        }
        x_sum_part.count += VEC;
    }
    x_sum_part.set_mean();
    #pragma unroll
    for (int p = 0; p < PACKS; ++p) {
        const index_t first = ((index_t)p * THREADS + threadIdx.x) * VEC;
        const bool is_inside = FULL || first < cols;
        if (!is_inside) continue;
        #pragma unroll
        for (int lane = 0; lane < VEC; ++lane) {
            const float x = x_packs[p][lane];
            const float x_sum_apart = x - x_sum_part.mean;
            x_sum_part.squares += x_sum_apart * x_sum_apart;
        }
    }
    const Moments<float> x_sum_and_squares = row_moments<0>(x_sum_part, (float)cols);
    const float x_sum = x_sum_and_squares.sum;
    const float x_centered_squared_sum = x_sum_and_squares.squares;
    const float x_mean = x_sum / (float)cols;
    const float inverse_deviation = rsqrtf(x_centered_squared_sum / (float)cols + eps);

    #pragma unroll
    for (int p = 0; p < PACKS; ++p) {
        const index_t first = ((index_t)p * THREADS + threadIdx.x) * VEC;
        const bool is_inside = FULL || first < cols;
        if (!is_inside) continue;
        Pack<float> out_pack;
        #pragma unroll
        for (int lane = 0; lane < VEC; ++lane) {
            const float x = x_packs[p][lane];
            const float x_centered = x - x_mean;
            const float weight = weight_packs[p][lane];
            const float bias = bias_packs[p][lane];
            const float out = x_centered * inverse_deviation * weight + bias;
            out_pack[lane] = out;
        }
        store_pack(out_ptr + row * out_stride0 + first, out_pack);
    }
}
