// The threads of one step: a step is a row of phases, a phase a number of tasks that they share out one by one.
#pragma once
#include <immintrin.h>
#include <sched.h>

#include <atomic>
#include <vector>

namespace headrace {

// A step has some hundred phases, most of them of microseconds: to sleep between them would cost more than the work. Where
// the cores are shared, a thread that spins may wait for one that has no core; it gives its own away then.
constexpr int kSpinsBeforeYield = 2000;

class Team {
 public:
  explicit Team(int phases_max) : phases_(phases_max) {}

  // Before a step: nothing is done. No member may be at work.
  void gather() {
    for (Phase& phase : phases_) {
      phase.taken.store(0, std::memory_order_relaxed);
      phase.done.store(0, std::memory_order_relaxed);
    }
  }

 private:
  friend class Member;

  struct alignas(64) Phase {
    std::atomic<int> taken{0};
    std::atomic<int> done{0};
  };

  std::vector<Phase> phases_;
};

// One thread's way through the phases. A phase ends when its tasks are done, not when all threads have come to it: one that
// had no core meanwhile holds nobody up, and passes by what was done without it.
class Member {
 public:
  Member(Team& team, int number) : number(number), team_(team) {}

  const int number;

  // Calls task(i, next) for each i below `count`, once in the whole team; `next` is what the same thread will be given after
  // it, or `count` or more. All threads call this alike; when it returns, all tasks are done and what they wrote is seen.
  template <class Task>
  void each(int count, Task&& task) {
    Team::Phase& phase = team_.phases_[phase_++];
    int mine = 0;
    for (int i = take(phase), next; i < count; i = next, mine++) {
      next = take(phase);
      task(i, next);
    }
    if (mine) phase.done.fetch_add(mine, std::memory_order_acq_rel);
    for (int spins = 0; phase.done.load(std::memory_order_acquire) < count; spins++) {
      if (spins < kSpinsBeforeYield)
        _mm_pause();
      else
        sched_yield();
    }
  }

 private:
  static int take(Team::Phase& phase) { return phase.taken.fetch_add(1, std::memory_order_relaxed); }

  Team& team_;
  int phase_ = 0;
};

}  // namespace headrace
