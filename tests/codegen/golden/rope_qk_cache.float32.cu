// rope_qk_cache: rotary position embedding of queries and keys; keys and values go straight into their rows of a
// static cache
//
// Moves each operand once: q 4 B/element, cos 4 B/column, sin 4 B/column, q_out 4 B/element, position 8 B in
// all, k 4 B/element, v 4 B/element, k_cache 4 B/element, v_cache 4 B/element.
// Maths in float32, rounded once, at the store.
// Origin: library kernel rope_qk_cache, variant rotate_half.
// Source: https://arxiv.org/abs/2104.09864

#ifndef THREADS
#define THREADS 256  // threads along a row
#endif
#ifndef ROWS
#define ROWS 1  // threads along a column
#endif
#ifndef PACKS
#define PACKS 4  // packs of a thread: neighbouring rows
#endif
#ifndef ONCE
#define ONCE 1  // 1 where the grid's second side holds all columns
#endif
#ifndef VEC
#define VEC 4  // columns of a pack, a divisor of every row and stride
#endif
#ifdef WIDE_INDEX
typedef long long index_t;  // an index or an address passes 32 bits
#else
typedef int index_t;
#endif

// ---- helpers ----

extern "C" __device__ void __assertfail(const char* message, const char* file, unsigned line, const char* function, size_t size);

// Whether a position lies in its tensor. One that does not stops the kernel, as it stops torch's: device-side assert triggered.
__device__ __forceinline__ bool checked(long long place, long long extent) {
    const bool is_inside = (unsigned long long)place < (unsigned long long)extent;
    if (!is_inside) __assertfail("position out of range", "fa_rope_qk_cache_68ba5d", 0, "checked", sizeof(char));
    return is_inside;
}

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

// ---- kernel ----

__device__ __forceinline__ void part1(
    const float* __restrict__ q_ptr,
    const float* __restrict__ cos_ptr,
    const float* __restrict__ sin_ptr,
    float* __restrict__ q_out_ptr,
    index_t rows,
    index_t cols,
    index_t q_stride0,
    index_t q_offset,
    index_t cos_offset,
    index_t sin_offset,
    index_t q_out_stride0,
    index_t q_out_offset,
    index_t block) {
    const index_t top = ((index_t)block * ROWS + threadIdx.y) * PACKS;  // the thread's first row
    if (top >= rows) return;
    const index_t step = (index_t)gridDim.y * THREADS * VEC;
    for (index_t first = ((index_t)blockIdx.y * THREADS + threadIdx.x) * VEC; first < cols;
         first = ONCE ? cols : first + step) {
        Pack<float> q_packs[PACKS];
        Pack<float> q_shifted_packs[PACKS];
        #pragma unroll
        for (int p = 0; p < PACKS; ++p) {
            const index_t row = top + p;
            const bool is_inside = row < rows;
            q_packs[p] = load_pack(q_ptr + (row * q_stride0 + first), is_inside);
            q_shifted_packs[p] = load_pack(q_ptr + (row * q_stride0 + first + q_offset), is_inside);
        }
        const Pack<float> cos_pack = load_pack(cos_ptr + first);
        const Pack<float> cos_shifted_pack = load_pack(cos_ptr + (first + cos_offset));
        const Pack<float> sin_pack = load_pack(sin_ptr + first);
        const Pack<float> sin_shifted_pack = load_pack(sin_ptr + (first + sin_offset));
        #pragma unroll
        for (int p = 0; p < PACKS; ++p) {
            const index_t row = top + p;
            const bool is_inside = row < rows;
            if (!is_inside) continue;
            Pack<float> q_out_pack;
            Pack<float> q_out_pack_2;
            #pragma unroll
            for (int lane = 0; lane < VEC; ++lane) {
                const float q = q_packs[p][lane];
                const float q_shifted = q_shifted_packs[p][lane];
                const float cos_2 = cos_pack[lane];
                const float cos_shifted = cos_shifted_pack[lane];
                const float sin_2 = sin_pack[lane];
                const float sin_shifted = sin_shifted_pack[lane];
                const float q_out = q * cos_2 + -q_shifted * sin_2;
                const float q_out_shifted = q_shifted * cos_shifted + q * sin_shifted;
                q_out_pack[lane] = q_out;
                q_out_pack_2[lane] = q_out_shifted;
            }
            store_pack(q_out_ptr + (row * q_out_stride0 + first), q_out_pack);
            store_pack(q_out_ptr + (row * q_out_stride0 + first + q_out_offset), q_out_pack_2);
        }
    }
}

__device__ __forceinline__ void part2(
    const long long* __restrict__ position_ptr,
    const float* __restrict__ k_ptr,
    const float* __restrict__ cos_ptr,
    const float* __restrict__ sin_ptr,
    const float* __restrict__ v_ptr,
    float* __restrict__ k_cache_ptr,
    float* __restrict__ v_cache_ptr,
    index_t rows,
    index_t cols,
    index_t k_cache_extent,
    index_t k_stride0,
    index_t k_offset,
    index_t cos_offset,
    index_t sin_offset,
    index_t v_stride0,
    index_t v_offset,
    index_t k_cache_stride0,
    index_t k_cache_step0,
    index_t k_cache_offset,
    index_t v_cache_stride0,
    index_t v_cache_step0,
    index_t v_cache_offset,
    index_t block) {
    const index_t top = ((index_t)block * ROWS + threadIdx.y) * PACKS;  // the thread's first row
    if (top >= rows) return;
    const long long position = position_ptr[0];
    const bool fits_k_cache = checked(position, k_cache_extent);
    const index_t step = (index_t)gridDim.y * THREADS * VEC;
    for (index_t first = ((index_t)blockIdx.y * THREADS + threadIdx.x) * VEC; first < cols;
         first = ONCE ? cols : first + step) {
        Pack<float> k_packs[PACKS];
        Pack<float> k_shifted_packs[PACKS];
        Pack<float> v_packs[PACKS];
        Pack<float> v_shifted_packs[PACKS];
        #pragma unroll
        for (int p = 0; p < PACKS; ++p) {
            const index_t row = top + p;
            const bool is_inside = row < rows;
            k_packs[p] = load_pack(k_ptr + (row * k_stride0 + first), is_inside);
            k_shifted_packs[p] = load_pack(k_ptr + (row * k_stride0 + first + k_offset), is_inside);
            v_packs[p] = load_pack(v_ptr + (row * v_stride0 + first), is_inside);
            v_shifted_packs[p] = load_pack(v_ptr + (row * v_stride0 + first + v_offset), is_inside);
        }
        const Pack<float> cos_pack = load_pack(cos_ptr + first);
        const Pack<float> cos_shifted_pack = load_pack(cos_ptr + (first + cos_offset));
        const Pack<float> sin_pack = load_pack(sin_ptr + first);
        const Pack<float> sin_shifted_pack = load_pack(sin_ptr + (first + sin_offset));
        #pragma unroll
        for (int p = 0; p < PACKS; ++p) {
            const index_t row = top + p;
            const bool is_inside = row < rows;
            if (!is_inside) continue;
            Pack<float> k_cache_pack;
            Pack<float> k_cache_pack_2;
            Pack<float> v_cache_pack;
            Pack<float> v_cache_pack_2;
            #pragma unroll
            for (int lane = 0; lane < VEC; ++lane) {
                const float k = k_packs[p][lane];
                const float k_shifted = k_shifted_packs[p][lane];
                const float cos_2 = cos_pack[lane];
                const float cos_shifted = cos_shifted_pack[lane];
                const float sin_2 = sin_pack[lane];
                const float sin_shifted = sin_shifted_pack[lane];
                const float k_cache = k * cos_2 + -k_shifted * sin_2;
                const float k_cache_shifted = k_shifted * cos_shifted + k * sin_shifted;
                const float v = v_packs[p][lane];
                const float v_shifted = v_shifted_packs[p][lane];
                k_cache_pack[lane] = k_cache;
                k_cache_pack_2[lane] = k_cache_shifted;
                v_cache_pack[lane] = v;
                v_cache_pack_2[lane] = v_shifted;
            }
            if (fits_k_cache) {
                store_pack(k_cache_ptr + position * k_cache_step0 + row * k_cache_stride0 + first, k_cache_pack);
                store_pack(k_cache_ptr + position * k_cache_step0 + row * k_cache_stride0 + first + k_cache_offset, k_cache_pack_2);
                store_pack(v_cache_ptr + position * v_cache_step0 + row * v_cache_stride0 + first, v_cache_pack);
                store_pack(v_cache_ptr + position * v_cache_step0 + row * v_cache_stride0 + first + v_cache_offset, v_cache_pack_2);
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS * ROWS)
fa_rope_qk_cache_68ba5d(
    const float* __restrict__ q_ptr,
    const float* __restrict__ cos_ptr,
    const float* __restrict__ sin_ptr,
    const long long* __restrict__ position_ptr,
    const float* __restrict__ k_ptr,
    const float* __restrict__ v_ptr,
    float* __restrict__ q_out_ptr,
    float* __restrict__ k_cache_ptr,
    float* __restrict__ v_cache_ptr,
    index_t start_of_2,
    index_t rows_of_1,
    index_t cols_of_1,
    index_t q_stride0_of_1,
    index_t q_offset_of_1,
    index_t cos_offset_of_1,
    index_t sin_offset_of_1,
    index_t q_out_stride0_of_1,
    index_t q_out_offset_of_1,
    index_t rows_of_2,
    index_t cols_of_2,
    index_t k_cache_extent_of_2,
    index_t k_stride0_of_2,
    index_t k_offset_of_2,
    index_t cos_offset_of_2,
    index_t sin_offset_of_2,
    index_t v_stride0_of_2,
    index_t v_offset_of_2,
    index_t k_cache_stride0_of_2,
    index_t k_cache_step0_of_2,
    index_t k_cache_offset_of_2,
    index_t v_cache_stride0_of_2,
    index_t v_cache_step0_of_2,
    index_t v_cache_offset_of_2) {
    if (blockIdx.x < start_of_2)
        part1(q_ptr, cos_ptr, sin_ptr, q_out_ptr, rows_of_1, cols_of_1, q_stride0_of_1, q_offset_of_1, cos_offset_of_1,
            sin_offset_of_1, q_out_stride0_of_1, q_out_offset_of_1, (index_t)blockIdx.x);
    else
        part2(position_ptr, k_ptr, cos_ptr, sin_ptr, v_ptr, k_cache_ptr, v_cache_ptr, rows_of_2, cols_of_2,
            k_cache_extent_of_2, k_stride0_of_2, k_offset_of_2, cos_offset_of_2, sin_offset_of_2, v_stride0_of_2,
            v_offset_of_2, k_cache_stride0_of_2, k_cache_step0_of_2, k_cache_offset_of_2, v_cache_stride0_of_2,
            v_cache_step0_of_2, v_cache_offset_of_2, (index_t)blockIdx.x - start_of_2);
}
