// Calls C++ kernels on buffers that end where the tensors end: no Python in the process, so that a sanitizer sees every access.
// Argument 1: a file of calls; argument 2: the first call to make. Each call says its number before it begins.
// KERNELS is the table of kernels, FA_TEAM stands for libgomp where ThreadSanitizer has to see the threads.

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <tuple>
#include <type_traits>
#include <vector>

using Call = void (*)(void **, const int64_t *, int);

// The arguments of one call, in order: pointers and integers may alternate.
struct Arguments {
  void **pointers;
  const int64_t *integers;
  int threads;

  template <class P> P next() {
    if constexpr (std::is_pointer_v<P>) {
      return static_cast<P>(*pointers++);
    } else if constexpr (std::is_same_v<P, int64_t>) {
      return *integers++;
    } else {
      return threads;
    }
  }
};

template <auto kernel> struct Spread;
template <class... P, void (*kernel)(P...)> struct Spread<kernel> {
  static void call(void **pointers, const int64_t *integers, int threads) {
    Arguments given{pointers, integers, threads};
    std::apply(kernel, std::tuple<P...>{given.next<P>()...});  // braces: from left to right
  }
};

static const Call kKernels[] = {KERNELS};

#ifdef FA_TEAM
// The OpenMP runtime in threads that ThreadSanitizer follows: GCC's own libgomp is not instrumented, and each of its barriers
// would be reported as a race.
#include <pthread.h>

struct Team {
  void (*function)(void *);
  void *data;
  int size;
  pthread_barrier_t barrier;
};
struct Member {
  Team *team;
  int number;
};
static thread_local Member member = {nullptr, 0};
static pthread_mutex_t atomic_lock = PTHREAD_MUTEX_INITIALIZER;

static void *begin(void *given) {
  member = *static_cast<Member *>(given);
  member.team->function(member.team->data);
  return nullptr;
}

extern "C" int omp_get_thread_num() { return member.number; }
extern "C" int omp_get_num_threads() { return member.team == nullptr ? 1 : member.team->size; }
extern "C" void GOMP_barrier() {
  if (member.team != nullptr) pthread_barrier_wait(&member.team->barrier);
}
extern "C" void GOMP_atomic_start() { pthread_mutex_lock(&atomic_lock); }
extern "C" void GOMP_atomic_end() { pthread_mutex_unlock(&atomic_lock); }
extern "C" void GOMP_parallel(void (*function)(void *), void *data, unsigned wanted, unsigned) {
  const int size = wanted == 0 ? 4 : static_cast<int>(wanted);
  Team team = {function, data, size, {}};
  pthread_barrier_init(&team.barrier, nullptr, static_cast<unsigned>(size));
  std::vector<pthread_t> threads(static_cast<size_t>(size));
  std::vector<Member> members;
  for (int i = 0; i < size; ++i) members.push_back({&team, i});
  for (size_t i = 0; i < threads.size(); ++i) pthread_create(&threads[i], nullptr, begin, &members[i]);
  for (pthread_t thread : threads) pthread_join(thread, nullptr);
  pthread_barrier_destroy(&team.barrier);
}
#endif

static FILE *file;

static int64_t integer() {
  int64_t found = 0;
  if (std::fread(&found, sizeof found, 1, file) != 1) std::exit(3);
  return found;
}

int main(int, char **arguments) {
  file = std::fopen(arguments[1], "rb");
  if (file == nullptr) return 3;
  const int64_t first = std::atoll(arguments[2]), calls = integer();
  for (int64_t number = 0; number < calls; ++number) {
    const int64_t kernel = integer(), threads = integer();
    // A tensor may begin at any element: once at the start of an allocation, once one element into it.
    std::vector<void *> allocations, pointers;
    for (int64_t left = integer(); left > 0; --left) {
      const int64_t shift = integer(), bytes = integer();
      auto *made = static_cast<unsigned char *>(std::malloc(static_cast<size_t>(shift + bytes)));
      if (bytes > 0 && std::fread(made + shift, static_cast<size_t>(bytes), 1, file) != 1) return 3;
      allocations.push_back(made);
      pointers.push_back(made + shift);
    }
    std::vector<int64_t> integers(static_cast<size_t>(integer()));
    for (int64_t &value : integers) value = integer();
    if (number >= first) {
      std::printf("call %lld\n", static_cast<long long>(number));
      std::fflush(stdout);
      kKernels[kernel](pointers.data(), integers.data(), static_cast<int>(threads));
    }
    for (void *allocation : allocations) std::free(allocation);
  }
  std::puts("finished");
}
