// Messages over MPI, by functions of the MPI library that the process has loaded: nothing is linked.
//
// Handles are passed as integers as wide as a register: Open MPI's are pointers and MPICH's are ints, which the calling
// conventions of x86-64 and AArch64 pass alike. A process needs MPI_THREAD_MULTIPLE.
#pragma once

#include "connections.hpp"

struct MpiLibrary {
    using Start = int (*)(void *data, int count, uintptr_t type, int rank, int tag, uintptr_t comm, void **request);
    using Test = int (*)(void **request, int *flag, void *status);
    using Cancel = int (*)(void **request);
    Start send, receive; // MPI_Isend, MPI_Irecv
    Test test;
    Cancel cancel;
    uintptr_t comm, byte; // handles of the communicator, and of MPI_BYTE
    int first_tag;
};

class MpiConnections final : public Connections {
  public:
    MpiConnections(const MpiLibrary &library, const std::vector<int> &ranks);

  protected:
    void begin_send(Peer &peer, const std::shared_ptr<Message> &message) override { begin(peer, message, library.send); }
    void begin_receive(Peer &peer, const std::shared_ptr<Message> &message) override;
    bool joins() const override { return true; }
    void move() override;
    short events(const Peer &, const Lane &) const override { return 0; } // there are no sockets
    int64_t longest_sleep() const override;
    int64_t yield_ns(bool by_maker) const override;
    bool has_work(const Peer &peer) const override;
    void lose(Peer &peer, Message::State state, const std::string &why) override;

  private:
    void begin(Peer &peer, const std::shared_ptr<Message> &message, MpiLibrary::Start start);
    bool is_over(Message &message, int &failure) const;

    const MpiLibrary library;
    std::vector<std::shared_ptr<Message>> moving;
    std::vector<std::shared_ptr<Message>> orphans; // cancelled messages that MPI has not given back
};
