// A team of warm threads that all run the same function and synchronise at barriers.
//
// A waiting thread spins for a bounded time and then yields its core. So two processes on two cores slow each other by a
// factor of two and not of fifty.
#pragma once

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <functional>
#include <mutex>
#include <thread>

#include "simd.h"

namespace outrider {

// A share [begin, end) of `count` things for one of several threads.
struct Share { int begin, end; };

class Team;

// One thread's part in a run.
struct Member {
    Team* team;
    int thread, threads;

    Share share(int count) const {
        const auto until = [&](int who) { return static_cast<int>(int64_t{count} * who / threads); };
        return {until(thread), until(thread + 1)};
    }
    inline void barrier() const;
};

// Flushes denormals, in every thread: the bits must not depend on which thread computes them.
template <class Body>
inline void flushing(const Body& body) {
    const uint64_t before = float_mode();
    set_float_mode(kFlushing);
    body();
    set_float_mode(before);
}

class Team {
   public:
    using Body = std::function<void(const Member&)>;

    // Runs the body once per thread; the caller is thread 0. One run at a time.
    void run(int threads, const Body& body) {
        std::lock_guard<std::mutex> turn(turn_);
        while (hired_ < threads - 1) std::thread([this, index = ++hired_, seen = job_.load()] { work(index, seen); }).detach();
        threads_ = threads;
        body_ = &body;
        caller_ = sched_getcpu();
        caller_alone_.store(threads == 1, std::memory_order_relaxed);
        if (threads > 1) {
            job_.store(((job_.load() >> 8) + 1) << 8 | static_cast<uint32_t>(threads));
            if (sleeping_.load() > 0) futex(FUTEX_WAKE_PRIVATE, INT_MAX);
        }
        act(0);
    }

    // A barrier of `threads` threads. A late thread must not read threads_, which the next run may have changed.
    void barrier(int threads) {
        if (threads == 1) return;
        const uint32_t phase = phase_.load(std::memory_order_relaxed);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads) {
            arrived_.store(0, std::memory_order_relaxed);
            phase_.store(phase + 1, std::memory_order_release);
        } else {
            wait_until([&] { return phase_.load(std::memory_order_acquire) != phase; });
        }
    }

   private:
    static constexpr int kSpins = 400;  // pauses before the core is offered to others: some 5 microseconds
    static constexpr int kTogether = 8;
    static constexpr int kIdle = 2000;  // waits before an idle worker sleeps: about a millisecond, some rounds of Python

    template <class Done>
    static void wait_until(Done done, int max_waits = INT_MAX) {
        for (int waits = 0; waits < max_waits && !done(); waits++) waits < kSpins ? pause() : void(sched_yield());
    }

    // Sleeps while the job word is unchanged, or wakes the sleeping threads.
    void futex(int what, uint32_t value) { syscall(SYS_futex, &job_, what, value, nullptr, nullptr, 0); }

    void work(int index, uint32_t seen) {
        int together = 0;  // jobs in a row that began on the caller's core
        for (;;) {
            const auto has_job = [&] { return job_.load(std::memory_order_acquire) != seen; };
            wait_until([&] { return has_job() || caller_alone_.load(std::memory_order_relaxed); }, kIdle);
            if (!has_job()) {
                sleeping_.fetch_add(1);
                while (job_.load() == seen) futex(FUTEX_WAIT_PRIVATE, seen);
                sleeping_.fetch_sub(1);
            }
            // the job word has the number of threads: a later job may have changed threads_ by now
            seen = job_.load(std::memory_order_acquire);
            if (index >= static_cast<int>(seen & 0xff)) continue;
            together = sched_getcpu() == caller_ ? together + 1 : 0;
            if (together == kTogether) step_aside(), together = 0;
            act(index);
        }
    }

    // Two threads that yield to each other may share a core for seconds while another core is idle. This moves one of them.
    void step_aside() const {
        cpu_set_t mine, others;
        if (sched_getaffinity(0, sizeof mine, &mine) || CPU_COUNT(&mine) < threads_) return;
        others = mine;
        CPU_CLR(caller_, &others);
        sched_setaffinity(0, sizeof others, &others);  // moves it; then it may go anywhere again
        sched_setaffinity(0, sizeof mine, &mine);
    }

    void act(int index) {
        const Member member{this, index, threads_};
        flushing([&] { (*body_)(member); });
        member.barrier();
    }

    std::mutex turn_;
    const Body* body_ = nullptr;
    int hired_ = 0, threads_ = 1, caller_ = -1;
    alignas(64) std::atomic<uint32_t> job_{0};  // count << 8 | threads
    std::atomic<bool> caller_alone_{false};  // the caller works alone, so idle threads should sleep and leave it its core
    std::atomic<int> sleeping_{0};
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<uint32_t> phase_{0};
};

inline void Member::barrier() const { team->barrier(threads); }

// The process's team. Threads do not survive a fork, so a child gets a new team. The parent's team is leaked there, because
// its locks may be held.
inline Team& team() {
    static std::mutex mutex;
    static Team* current = nullptr;
    static pid_t owner = 0;
    std::lock_guard<std::mutex> lock(mutex);
    if (owner != getpid()) {
        current = new Team;
        owner = getpid();
    }
    return *current;
}

}  // namespace outrider
