// qkv_heads: bias add, split into query, key and value, and heads before the sequence, in one pass over the
// packed projection
//
// Moves each operand once: packed 4 B/element; bias 4 B/element, the same for every i1; query 4 B/element; key
// 4 B/element; value 4 B/element.
// Maths in float32, rounded once, at the store.
// Origin: library kernel qkv_heads, variant split.
// Source: https://github.com/NVIDIA/FasterTransformer/blob/main/docs/bert_guide.md

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
#define VEC 4  // columns of a pack, a divisor of every row and stride
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

// ---- kernel ----

extern "C" __global__ void __launch_bounds__(THREADS * ROWS)
fa_qkv_heads_39d611(
    const float* __restrict__ packed_ptr,
    const float* __restrict__ bias_ptr,
    float* __restrict__ query_ptr,
    float* __restrict__ key_ptr,
    float* __restrict__ value_ptr,
    index_t rows,
    index_t size1,
    index_t cols,
    index_t packed_stride0,
    index_t packed_stride1,
    index_t bias_stride0,
    index_t packed_offset,
    index_t bias_offset,
    index_t packed_offset_2,
    index_t bias_offset_2,
    index_t query_stride0,
    index_t query_stride1,
    index_t key_stride0,
    index_t key_stride1,
    index_t value_stride0,
    index_t value_stride1) {
#ifdef SIZE1
    __builtin_assume(size1 == SIZE1);  // dividing by what is known takes a few instructions, not twenty
#endif
    const index_t top = ((index_t)blockIdx.x * ROWS + threadIdx.y) * PACKS;  // the thread's first row
    if (top >= rows) return;
    const index_t i0 = top / size1;
    const index_t step = (index_t)gridDim.y * THREADS * VEC;
    for (index_t first = ((index_t)blockIdx.y * THREADS + threadIdx.x) * VEC; first < cols;
         first = ONCE ? cols : first + step) {
        Pack<float> packed_packs[PACKS];
        Pack<float> packed_shifted_packs[PACKS];
        Pack<float> packed_shifted_packs_2[PACKS];
        #pragma unroll
        for (int p = 0; p < PACKS; ++p) {
            const index_t i1 = top % size1 + p;
            const bool is_inside = top + p < rows;
            const index_t packed_start = i0 * packed_stride0 + i1 * packed_stride1;
            packed_packs[p] = load_pack(packed_ptr + (packed_start + first), is_inside);
            packed_shifted_packs[p] = load_pack(packed_ptr + (packed_start + first + packed_offset), is_inside);
            packed_shifted_packs_2[p] = load_pack(packed_ptr + (packed_start + first + packed_offset_2), is_inside);
        }
        const Pack<float> bias_pack = load_pack(bias_ptr + (i0 * bias_stride0 + first));
        const Pack<float> bias_shifted_pack = load_pack(bias_ptr + (i0 * bias_stride0 + first + bias_offset));
        const Pack<float> bias_shifted_pack_2 = load_pack(bias_ptr + (i0 * bias_stride0 + first + bias_offset_2));
        #pragma unroll
        for (int p = 0; p < PACKS; ++p) {
            const index_t i1 = top % size1 + p;
            const bool is_inside = top + p < rows;
            const index_t query_start = i0 * query_stride0 + i1 * query_stride1;
            const index_t key_start = i0 * key_stride0 + i1 * key_stride1;
            const index_t value_start = i0 * value_stride0 + i1 * value_stride1;
            if (!is_inside) continue;
            Pack<float> query_pack;
            Pack<float> key_pack;
            Pack<float> value_pack;
            #pragma unroll
            for (int lane = 0; lane < VEC; ++lane) {
                const float packed = packed_packs[p][lane];
                const float bias = bias_pack[lane];
                const float query = packed + bias;
                const float packed_shifted = packed_shifted_packs[p][lane];
                const float bias_shifted = bias_shifted_pack[lane];
                const float key = packed_shifted + bias_shifted;
                const float packed_shifted_2 = packed_shifted_packs_2[p][lane];
                const float bias_shifted_2 = bias_shifted_pack_2[lane];
                const float value = packed_shifted_2 + bias_shifted_2;
                query_pack[lane] = query;
                key_pack[lane] = key;
                value_pack[lane] = value;
            }
            store_pack(query_ptr + (query_start + first), query_pack);
            store_pack(key_ptr + (key_start + first), key_pack);
            store_pack(value_ptr + (value_start + first), value_pack);
        }
    }
}
