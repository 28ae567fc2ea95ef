// A team of warm threads that all run the same function and meet at barriers.
//
// Waiting spins for a bounded time and then gives the core away, so that two processes on two cores
// slow each other by a factor of two and not of fifty.
#pragma once

#include <immintrin.h>
#include <sched.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace outrider {

class Team {
   public:
    using Body = std::function<void(int thread, int threads)>;

    // Runs body(0..threads-1); the caller is thread 0. One run at a time.
    void run(int threads, const Body& body) {
        std::lock_guard<std::mutex> turn(turn_);
        hire(threads);
        threads_ = threads;
        body_ = &body;
        caller_ = sched_getcpu();
        rest_.store(threads == 1, std::memory_order_relaxed);
        if (threads > 1) {
            running_.store(threads - 1, std::memory_order_relaxed);
            job_.store(((job_.load() >> 8) + 1) << 8 | static_cast<uint32_t>(threads));
            if (asleep_.load() > 0) {
                std::lock_guard<std::mutex> lock(mutex_);
                wake_.notify_all();
            }
        }
        act(0);
        wait_until([&] { return running_.load(std::memory_order_acquire) == 0; });
    }

    // The same for one thread, without taking a turn or waking anybody.
    template <class Alone>
    static void run_alone(const Alone& body) {
        const unsigned before = _mm_getcsr();
        _mm_setcsr(kFlush);
        body(0, 1);
        _mm_setcsr(before);
    }

    void barrier() {
        if (threads_ == 1) return;
        const uint32_t phase = phase_.load(std::memory_order_relaxed);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads_) {
            arrived_.store(0, std::memory_order_relaxed);
            phase_.store(phase + 1, std::memory_order_release);
        } else {
            wait_until([&] { return phase_.load(std::memory_order_acquire) != phase; });
        }
    }

   private:
    static constexpr unsigned kFlush = 0x9fc0;
    static constexpr int kSpins = 400;  // pauses before the core is offered to others: some 5 microseconds
    static constexpr int kTogether = 8;
    static constexpr int kIdle = 2000;  // waits before an idle worker sleeps: about a millisecond, some rounds of Python

    static void wait(int waits) {
        if (waits < kSpins)
            _mm_pause();
        else
            sched_yield();
    }

    template <class Done>
    static void wait_until(Done done) {
        for (int waits = 0; !done(); waits++) wait(waits);
    }

    void hire(int threads) {
        while (static_cast<int>(workers_.size()) < threads - 1) {
            const int index = static_cast<int>(workers_.size()) + 1;
            workers_.emplace_back([this, index, seen = job_.load()] { work(index, seen); });
            workers_.back().detach();
        }
    }

    void work(int index, uint32_t seen) {
        int together = 0;  // jobs in a row that began on the caller's core
        for (;;) {
            for (int waits = 0; job_.load(std::memory_order_acquire) == seen; waits++) {
                if (waits < kIdle && !rest_.load(std::memory_order_relaxed)) {
                    wait(waits);
                    continue;
                }
                std::unique_lock<std::mutex> lock(mutex_);
                asleep_.fetch_add(1);
                wake_.wait(lock, [&] { return job_.load() != seen; });
                asleep_.fetch_sub(1);
            }
            // the word itself says who takes part: by now a later job may have changed threads_
            seen = job_.load(std::memory_order_acquire);
            if (index < static_cast<int>(seen & 0xff)) {
                together = sched_getcpu() == caller_ ? together + 1 : 0;
                if (together == kTogether) step_aside(), together = 0;
                act(index);
                running_.fetch_sub(1, std::memory_order_release);
            }
        }
    }

    // Threads that wait by yielding may share a core for seconds while another is idle: not every scheduler parts them.
    void step_aside() const {
        cpu_set_t mine, others;
        if (sched_getaffinity(0, sizeof mine, &mine) || CPU_COUNT(&mine) < threads_) return;
        others = mine;
        CPU_CLR(caller_, &others);
        sched_setaffinity(0, sizeof others, &others);  // moves it; then it may go anywhere again
        sched_setaffinity(0, sizeof mine, &mine);
    }

    // Denormals are flushed in every thread alike: the bits must not depend on who computes.
    void act(int index) {
        const unsigned before = _mm_getcsr();
        _mm_setcsr(kFlush);
        (*body_)(index, threads_);
        _mm_setcsr(before);
    }

    std::mutex turn_, mutex_;
    std::condition_variable wake_;
    std::vector<std::thread> workers_;
    const Body* body_ = nullptr;
    int threads_ = 1, caller_ = -1;
    alignas(64) std::atomic<uint32_t> job_{0};  // count << 8 | threads
    std::atomic<bool> rest_{false};  // the caller works alone: whoever idles should sleep, not share its core
    std::atomic<int> asleep_{0};
    alignas(64) std::atomic<int> running_{0};
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<uint32_t> phase_{0};
};

// The process's team. Threads do not survive a fork, so a child gets a team of its own; the
// parent's is left where it is, because its threads may hold anything.
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
