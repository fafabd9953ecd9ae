// rope_interleaved: rotary position embedding over neighbouring pairs: x * cos + rotate_pairs(x) * sin, x read
// where it lies in the projection
//
// Moves each operand once: x 4 B/element; cos 4 B/element, the same for every i1; sin 4 B/element, the same for
// every i1; out 4 B/element.
// Maths in float32, rounded once, at the store.
// Origin: library kernel rope_interleaved, variant stack.
// Source: https://arxiv.org/abs/2104.09864

#ifndef THREADS
#define THREADS 256  // threads along a row
#endif
#ifndef ROWS
#define ROWS 1  // threads along a column
#endif
#ifndef PACKS
#define PACKS 1  // packs of a thread: neighbouring rows, a divisor of their count
#endif
#ifndef ONCE
#define ONCE 1  // 1 where the grid's second side holds all columns
#endif
#ifndef VEC
#define VEC 2  // columns of a pack, a divisor of every row and stride
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

// VEC columns in a row, of EACH neighbours each: one 16-byte access (or two). The launch sees to it that rows hold whole packs and
// are aligned; a single column is moved element by element.
template <typename T, int EACH = 1>
union Pack {
    typedef typename Word<sizeof(T) * VEC * (VEC > 1 ? EACH : 1)>::type word_t;
    word_t words[sizeof(T) * VEC * EACH / sizeof(word_t)];  // what is copied: two halves stay in one register
    T at[VEC * EACH];
    __device__ __forceinline__ T& operator[](int lane) { return at[lane]; }
    __device__ __forceinline__ const T& operator[](int lane) const { return at[lane]; }
};

// Zeros, unread, where it is not wanted.
template <int EACH = 1, typename T>
__device__ __forceinline__ Pack<T, EACH> load_pack(const T* from, bool is_wanted = true) {
    typedef typename Pack<T, EACH>::word_t word_t;
    Pack<T, EACH> pack;
    #pragma unroll
    for (int n = 0; n < sizeof(pack) / sizeof(word_t); ++n)
        pack.words[n] = is_wanted ? reinterpret_cast<const word_t*>(from)[n] : word_t{};
    return pack;
}

template <typename T, int EACH>
__device__ __forceinline__ void store_pack(T* to, const Pack<T, EACH>& pack) {
    typedef typename Pack<T, EACH>::word_t word_t;
    #pragma unroll
    for (int n = 0; n < sizeof(pack) / sizeof(word_t); ++n) reinterpret_cast<word_t*>(to)[n] = pack.words[n];
}

// ---- kernel ----

extern "C" __global__ void __launch_bounds__(THREADS * ROWS)
fa_rope_interleaved_dbefe7(
    const float* __restrict__ x_ptr,
    const float* __restrict__ cos_ptr,
    const float* __restrict__ sin_ptr,
    float* __restrict__ out_ptr,
    index_t rows,
    index_t size1,
    index_t cols,
    index_t x_stride0,
    index_t x_stride1,
    index_t cos_stride0,
    index_t sin_stride0,
    index_t out_stride0,
    index_t out_stride1) {
#ifdef SIZE1
    __builtin_assume(size1 == SIZE1);  // dividing by what is known takes a few instructions, not twenty
#endif
    const index_t top = ((index_t)blockIdx.x * ROWS + threadIdx.y) * PACKS;  // the thread's first row
    if (top >= rows) return;
    const index_t i0 = top / size1;
    const index_t step = (index_t)gridDim.y * THREADS * VEC;
    for (index_t first = ((index_t)blockIdx.y * THREADS + threadIdx.x) * VEC; first < cols;
         first = ONCE ? cols : first + step) {
        Pack<float, 2> x_packs[PACKS];
        #pragma unroll
        for (int p = 0; p < PACKS; ++p) {
            const index_t i1 = top % size1 + p;
            const bool is_inside = top + p < rows;
            const index_t x_start = i0 * x_stride0 + i1 * x_stride1;
            x_packs[p] = load_pack<2>(x_ptr + (x_start + first * 2), is_inside);
        }
        const Pack<float, 2> cos_pack = load_pack<2>(cos_ptr + (i0 * cos_stride0 + first * 2));
        const Pack<float, 2> sin_pack = load_pack<2>(sin_ptr + (i0 * sin_stride0 + first * 2));
        #pragma unroll
        for (int p = 0; p < PACKS; ++p) {
            const index_t i1 = top % size1 + p;
            const bool is_inside = top + p < rows;
            const index_t out_start = i0 * out_stride0 + i1 * out_stride1;
            if (!is_inside) continue;
            Pack<float, 2> out_pack;
            #pragma unroll
            for (int lane = 0; lane < VEC; ++lane) {
                const float x_even = x_packs[p][2 * lane];
                const float x_odd = x_packs[p][2 * lane + 1];
                const float cos_even = cos_pack[2 * lane];
                const float cos_odd = cos_pack[2 * lane + 1];
                const float sin_even = sin_pack[2 * lane];
                const float sin_odd = sin_pack[2 * lane + 1];
                const float out_even = x_even * cos_even + -x_odd * sin_even;
                const float out_odd = x_odd * cos_odd + x_even * sin_odd;
                out_pack[2 * lane] = out_even;
                out_pack[2 * lane + 1] = out_odd;
            }
            store_pack(out_ptr + (out_start + first * 2), out_pack);
        }
    }
}
