#include "host_exchange.hpp"

#if defined(__linux__)

#include <algorithm>
#include <cstring>
#include <utility>

namespace {

constexpr uint64_t TAG = 0; // as in ranks/inter_host/multi_host.py

} // namespace

void HostExchange::start(int rank, char *data, int64_t nbytes, bool is_sent, const std::string &head) {
    const int peer = connections->index_of(rank);
    if (peer < 0) return; // a program has only ranks to which there are connections
    if (is_sent)
        sends.messages.push_back(connections->send(peer, TAG, data, nbytes, head));
    else
        receives.messages.push_back(connections->receive(peer, TAG, data, nbytes));
}

void HostExchange::begin(const HostMessages &messages, const SharedMemory::Address &address, uint64_t number) {
    if (messages.compared.empty()) {
        for (const auto *parts : {&messages.receives, &messages.sends})
            for (const HostMessages::Part &part : *parts)
                if (part.nbytes > 0) start(part.rank, address(part.at), part.nbytes, parts == &messages.sends);
        return;
    }
    digest = messages.digest; // as in exchange.call_digest
    uint64_t first;
    std::memcpy(&first, digest.data(), sizeof first);
    first += number;
    std::memcpy(digest.data(), &first, sizeof first);
    sent.resize(messages.compared.size());
    received.resize(messages.compared.size());
    // These messages begin before the others are expected, so that they arrive earlier.
    for (size_t k = 0; k < messages.compared.size(); k++) {
        const auto is_own = [&](const HostMessages::Part &part) { return part.rank == messages.compared[k]; };
        const auto first = std::find_if(messages.sends.begin(), messages.sends.end(), is_own);
        if (first != messages.sends.end() && std::none_of(first + 1, messages.sends.end(), is_own)) { // copies nothing
            start(messages.compared[k], address(first->at), first->nbytes, true, digest);
            continue;
        }
        sent[k].clear();
        for (auto part = first; part != messages.sends.end(); part = std::find_if(part + 1, messages.sends.end(), is_own)) {
            const char *at = address(part->at);
            sent[k].insert(sent[k].end(), at, at + part->nbytes);
        }
        start(messages.compared[k], sent[k].data(), static_cast<int64_t>(sent[k].size()), true, digest);
    }
    for (size_t k = 0; k < messages.compared.size(); k++) {
        received[k].resize(DIGEST_NBYTES + static_cast<size_t>(messages.room));
        start(messages.compared[k], received[k].data(), static_cast<int64_t>(received[k].size()), false);
    }
}

// Copy the data of first messages. Return whether all hosts make the same call; else nothing is copied.
bool HostExchange::take(const HostMessages &messages, const SharedMemory::Address &address) const {
    for (size_t k = 0; k < messages.compared.size(); k++)
        if (std::memcmp(received[k].data(), digest.data(), DIGEST_NBYTES) != 0) return false;
    for (size_t k = 0; k < messages.compared.size(); k++) {
        const char *from = received[k].data() + DIGEST_NBYTES;
        for (const HostMessages::Part &part : messages.receives) {
            if (part.rank != messages.compared[k] || part.nbytes == 0) continue;
            std::memcpy(address(part.at), from, static_cast<size_t>(part.nbytes));
            from += part.nbytes;
        }
    }
    return true;
}

// Return whether the first `count` messages, or all of them if it is -1, are complete.
bool HostExchange::is_complete(Begun &begun, long long count, int64_t until_ns) {
    const size_t wanted = count < 0 ? begun.messages.size() : std::min(begun.messages.size(), static_cast<size_t>(count));
    for (; begun.complete < wanted; begun.complete++) {
        waited_for = begun.messages[begun.complete];
        if (connections->wait(*waited_for, until_ns) != Message::State::done) return false;
    }
    waited_for = nullptr;
    return true;
}

Outcome HostExchange::run(const HostMessages &messages, const SharedMemory::Address &address, uint64_t number, int64_t until_ns) {
    if (op != number) {
        for (Begun *each : {&sends, &receives}) each->messages.clear(), each->complete = 0;
        op = number, has_begun = false;
    }
    if (!std::exchange(has_begun, true)) begin(messages, address, number);
    if (!is_complete(receives, messages.received, until_ns) || !is_complete(sends, messages.sent, until_ns)) return Outcome::elsewhere;
    has_begun = false;
    return messages.compared.empty() || take(messages, address) ? Outcome::done : Outcome::differs;
}

#endif
