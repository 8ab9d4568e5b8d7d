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
    std::shared_ptr<Message> awaited() const { return waited_for; }

    const std::shared_ptr<Connections> connections;

  private:
    struct Begun { // messages of the op
        std::vector<std::shared_ptr<Message>> messages;
        size_t complete = 0; // how many of them are, from the first
    };

    void begin(const HostMessages &messages, const SharedMemory::Address &address, uint64_t number);
    void start(int rank, char *data, int64_t nbytes, bool is_sent, const std::string &head = {});
    bool is_complete(Begun &begun, long long count, int64_t until_ns);
    bool take(const HostMessages &messages, const SharedMemory::Address &address) const;

    Begun sends, receives;
    uint64_t op = 0;
    bool has_begun = false; // the messages of the current instruction
    std::shared_ptr<Message> waited_for;
    std::vector<std::vector<char>> sent, received; // first messages, in the order of the ranks that are compared
    std::string digest;                            // of the call, with its number
};
