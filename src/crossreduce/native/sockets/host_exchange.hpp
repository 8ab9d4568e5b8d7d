// Messages with other hosts as instructions of a rank program, over `Connections`.
#pragma once

#include <memory>
#include <vector>

#include "connections.hpp"
#include "shared_memory.hpp"

class HostExchange {
  public:
    explicit HostExchange(std::shared_ptr<Connections> carried) : connections(std::move(carried)) {}
    // Begin or continue an exchange; see SharedMemory::exchange.
    Outcome run(const HostMessages &messages, const SharedMemory::Address &address, uint64_t number, int64_t until_ns);
    // The message for which an exchange waits, or which has failed; null if none does.
    std::shared_ptr<Message> awaited() const { return pending.size() > arrived ? pending[arrived] : nullptr; }

    const std::shared_ptr<Connections> connections;

  private:
    void begin(const HostMessages &messages, const SharedMemory::Address &address, uint64_t number);
    void start(int rank, char *data, int64_t nbytes, bool sends);
    bool take(const HostMessages &messages, const SharedMemory::Address &address) const;

    std::vector<std::shared_ptr<Message>> pending; // of the exchange that has begun
    size_t arrived = 0;                            // how many of them have
    std::vector<std::vector<char>> sent, received; // first messages, in the order of the ranks that are compared
    std::string digest;                            // of the call, with its number
};
