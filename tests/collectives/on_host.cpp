// Runs the CUDA kernel's own source on a CPU: every rank is a thread that calls it in turn, every CUDA thread is a thread.
//
// Usage: on_host calls seed [rows blocks rows_per_round] ... Each call takes the next shape, from the first again after the last.
// Compares every call's bits over the ranks and with a sum in the order of the ranks; ends with 1 where they differ.
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <pthread.h>
#include <thread>
#include <vector>

#define ON_HOST
#define __align__(n) alignas(n)
#define __restrict__ __restrict
#define KERNEL static void
#define DEVICE static inline
#define DEVICE_MEMBER inline

struct Dim {
  int x;
};
static thread_local Dim threadIdx, blockIdx, gridDim;
static thread_local int this_rank;
#define RANK this_rank
static thread_local pthread_barrier_t *of_block;
static thread_local float *sums;

static void __syncthreads() { pthread_barrier_wait(of_block); }
static float rsqrtf(float value) { return 1.0f / std::sqrt(value); }

DEVICE void store_flag(unsigned long long *flag, unsigned long long value) { __atomic_store_n(flag, value, __ATOMIC_RELEASE); }
DEVICE unsigned long long load_flag(const unsigned long long *flag) {
  std::this_thread::yield();
  return __atomic_load_n(flag, __ATOMIC_ACQUIRE);
}
DEVICE unsigned long long nanoseconds() { return std::chrono::steady_clock::now().time_since_epoch().count(); }
DEVICE unsigned take_ticket(unsigned *counter) { return __atomic_fetch_add(counter, 1u, __ATOMIC_ACQ_REL); }
DEVICE void give_up() {
  std::fprintf(stderr, "a flag never came\n");
  std::exit(3);
}
DEVICE void widen(unsigned word, float &low, float &high) {
  const unsigned bits[2] = {word << 16, word & 0xffff0000u};
  std::memcpy(&low, &bits[0], 4);
  std::memcpy(&high, &bits[1], 4);
}
static unsigned half(float value) {
  unsigned bits;
  std::memcpy(&bits, &value, 4);
  return (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
}
DEVICE unsigned narrow(float low, float high) { return half(low) | half(high) << 16; }
static float block_sum(float value) {
  sums[threadIdx.x] = value;
  __syncthreads();
  float sum = 0.0f;
  for (int i = 0; i < THREADS; ++i) sum += sums[i];
  __syncthreads();
  return sum;
}
struct Pack;
DEVICE Pack load_shared(const Pack *at);

#include KERNEL_FILE

DEVICE Pack load_shared(const Pack *at) { return *at; }

constexpr int COLS = 8 * (THREADS * PACKS - 3), COLUMN_PACKS = COLS / 8, BUFFER_BYTES = DATA_AT + RING * RING_BYTES;

struct Shape {
  int rows, blocks, rows_per_round;
};
struct Rank {
  std::vector<Pack> x, residual, total, out;
};

static unsigned next(unsigned &state) { return state = state * 1664525u + 1013904223u; }

static std::vector<Pack> drawn(int rows, unsigned state) {
  std::vector<Pack> made(rows * COLUMN_PACKS);
  for (Pack &pack : made)
    for (unsigned &word : pack.word) {
      const float low = (next(state) >> 8) / 8388608.0f - 1.0f, high = (next(state) >> 8) / 8388608.0f - 1.0f;
      word = narrow(low, high);
    }
  return made;
}

// Rows of the weight, the shift and the offset.
using Vectors = std::vector<std::vector<Pack>>;

static void launch(int rank, const Shape &shape, Rank &own, const Vectors &of, const std::vector<char *> &buffers) {
  const int rounds = (shape.rows + shape.blocks * shape.rows_per_round - 1) / (shape.blocks * shape.rows_per_round);
  std::vector<std::thread> threads;
  std::vector<pthread_barrier_t> barriers(shape.blocks);
  std::vector<std::vector<float>> shared(shape.blocks, std::vector<float>(THREADS));
  for (auto &barrier : barriers) pthread_barrier_init(&barrier, nullptr, THREADS);
  for (int block = 0; block < shape.blocks; ++block)
    for (int thread = 0; thread < THREADS; ++thread)
      threads.emplace_back([&, block, thread] {
        this_rank = rank;
        threadIdx.x = thread, blockIdx.x = block, gridDim.x = shape.blocks;
        of_block = &barriers[block];
        sums = shared[block].data();
        fa_kernel(
            own.x.data(), own.residual.data(), of[0].data(),
#if NORM == 2
            of[1].data(),
#endif
#if HAS_OFFSET
            of[2].data(),
#endif
            own.total.data(), own.out.data(), buffers[0], buffers[1], buffers[2], buffers[3], buffers[4], buffers[5], buffers[6],
            buffers[7], shape.rows, COLUMN_PACKS, shape.rows_per_round, rounds, 1e-6f, 60000000000ull);
      });
  for (auto &thread : threads) thread.join();
  for (auto &barrier : barriers) pthread_barrier_destroy(&barrier);
}

static bool is_right(const std::vector<std::vector<Rank>> &calls, const Vectors &of) {
  for (const auto &ranks : calls)
    for (size_t i = 0; i < ranks[0].x.size(); ++i)
      for (int s = 0; s < WORLD; ++s) {
        float sum[8] = {};
        for (int from = 0; from < WORLD; ++from) add(sum, ranks[from].x[i]);
        if (HAS_OFFSET) add(sum, of[2][i % COLUMN_PACKS]);
        add(sum, ranks[s].residual[i]);
        const Pack right = rounded(sum);
        if (std::memcmp(&right, &ranks[s].total[i], 16) || std::memcmp(&ranks[0].out[i], &ranks[s].out[i], 16)) return false;
      }
  for (const auto &ranks : calls)
    for (size_t row = 0; row < ranks[0].x.size() / COLUMN_PACKS; ++row) {
      double squares = 0.0, mean = 0.0;
      std::vector<float> total(COLS), out(COLS), factors(COLS), shifts(COLS);
      for (int i = 0; i < COLS / 2; ++i) {
        const size_t at = row * COLUMN_PACKS + i / 4;
        widen(ranks[0].total[at].word[i % 4], total[2 * i], total[2 * i + 1]);
        widen(ranks[0].out[at].word[i % 4], out[2 * i], out[2 * i + 1]);
        widen(of[0][i / 4].word[i % 4], factors[2 * i], factors[2 * i + 1]);
        if (NORM == 2) widen(of[1][i / 4].word[i % 4], shifts[2 * i], shifts[2 * i + 1]);
      }
      if (NORM == 2)
        for (float value : total) mean += double(value) / COLS;
      for (float value : total) squares += (value - mean) * (value - mean);
      for (int i = 0; i < COLS; ++i) {
        const double scaled = factors[i] / std::sqrt(squares / COLS + 1e-6), right = scaled * (total[i] - mean) + shifts[i];
        double most = 0.02 * std::fabs(right) + 1e-6;  // three roundings to 8 bits
        if (NORM == 2) most += 0.008 * (std::fabs(scaled * total[i]) + std::fabs(shifts[i]));  // less the mean, the result is less
        if (!(std::fabs(out[i] - right) <= most)) return false;
      }
    }
  return true;
}

int main(int count, char **arguments) {
  const int calls = std::atoi(arguments[1]);
  const unsigned seed = std::atoi(arguments[2]);
  std::vector<Shape> shapes;
  for (int i = 3; i + 2 < count; i += 3)
    shapes.push_back({std::atoi(arguments[i]), std::atoi(arguments[i + 1]), std::atoi(arguments[i + 2])});
  std::vector<std::vector<Pack>> memory(WORLD, std::vector<Pack>(BUFFER_BYTES / 16));
  std::vector<char *> buffers(8, nullptr);
  for (int s = 0; s < WORLD; ++s) buffers[s] = reinterpret_cast<char *>(memory[s].data());
  const Vectors of = {drawn(1, seed), drawn(1, seed + 1), drawn(1, seed + 2)};
  std::vector<std::vector<Rank>> made(calls, std::vector<Rank>(WORLD));
  for (int call = 0; call < calls; ++call)
    for (int s = 0; s < WORLD; ++s) {
      const int rows = shapes[call % shapes.size()].rows;
      Rank &rank = made[call][s];
      rank.x = drawn(rows, seed + 100 * call + s);
      rank.residual = drawn(rows, seed + 100 * call + 50);
      rank.total.resize(rank.x.size());
      rank.out.resize(rank.x.size());
    }
  std::vector<std::thread> ranks;
  for (int s = 0; s < WORLD; ++s)
    ranks.emplace_back([&, s] {
      for (int call = 0; call < calls; ++call) launch(s, shapes[call % shapes.size()], made[call][s], of, buffers);
    });
  for (auto &rank : ranks) rank.join();
  const bool is = is_right(made, of);
  std::puts(is ? "right" : "wrong");
  return is ? 0 : 1;
}
