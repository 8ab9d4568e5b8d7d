#include "call_log.hpp"

#include <algorithm>
#include <cstring>

#include "futex.hpp"

// A sequence lock: `number` is cleared before the first change and set after the last one. Each store releases the
// stores before it; each load acquires before the loads after it.
void CallRecord::write(uint64_t new_number, const std::string &text, int64_t ns) {
    number.store(0, std::memory_order_relaxed);
    const size_t size = std::min<size_t>(text.size(), SIGNATURE_NBYTES);
    length.store(static_cast<uint32_t>(size), std::memory_order_release);
    started_ns.store(ns, std::memory_order_release);
    ended_ns.store(0, std::memory_order_release);
    for (size_t at = 0; at < size; at += 8) {
        uint64_t word = 0;
        std::memcpy(&word, text.data() + at, std::min<size_t>(8, size - at));
        signature[at / 8].store(word, std::memory_order_release);
    }
    number.store(new_number, std::memory_order_release);
}

bool CallRecord::read(uint64_t wanted, std::string &text, int64_t &started, int64_t &ended) const {
    if (number.load(std::memory_order_acquire) != wanted) return false;
    const size_t size = std::min<size_t>(length.load(std::memory_order_acquire), SIGNATURE_NBYTES);
    char copy[SIGNATURE_NBYTES];
    for (size_t at = 0; at < size; at += 8) {
        const uint64_t word = signature[at / 8].load(std::memory_order_acquire);
        std::memcpy(copy + at, &word, 8);
    }
    text.assign(copy, size);
    started = started_ns.load(std::memory_order_acquire);
    ended = ended_ns.load(std::memory_order_acquire);
    return number.load(std::memory_order_relaxed) == wanted;
}

void CallLog::begin(uint64_t number, const std::string &signature, int kind, int64_t bytes) {
    current = &calls->records[number % RECORDED_CALLS];
    counts = &calls->counts[kind];
    nbytes = bytes;
    const int64_t now = now_ns();
    current->write(number, signature, now);
    if (traced != next_trace) traced = next_trace;
    if (traced) traced->begin(number, signature, now, queued_ns);
    queued_ns = 0;
}

void CallLog::end(int outcome, bool completed) {
    if (current == nullptr) return;
    const int64_t now = now_ns();
    current->ended_ns.store(now, std::memory_order_relaxed);
    if (traced) traced->end(now, outcome);
    if (completed) {
        add(counts->calls, 1);
        add(counts->nbytes, static_cast<uint64_t>(nbytes));
        add(counts->ns, static_cast<uint64_t>(now - current->started_ns.load(std::memory_order_relaxed)));
    }
    current = nullptr;
}

void CallLog::trace(Phase phase, size_t stage, int other) {
    if (traced && current != nullptr) traced->record(phase, now_ns(), other, stage);
}

void CallLog::trace_open_wait(int other, size_t stage) {
    if (traced && current != nullptr) traced->record_open_wait(now_ns(), other, stage);
}

void CallLog::abort_trace(int outcome) {
    if (traced && current != nullptr) traced->end(now_ns(), outcome);
}
