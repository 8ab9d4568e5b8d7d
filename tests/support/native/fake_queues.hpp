// The fake CUDA driver: contexts, streams, events, operations, and their execution in a random allowed order.
//
// An operation follows its predecessors: the operations at the end of its stream, which are those that an event's
// stream ended with, too, after a wait. It runs at a later call, in any order that its predecessors allow. Its clock is
// known when it is queued, so that the report does not depend on the order in which operations happen to run.
#pragma once

#include <functional>
#include <mutex>
#include <random>
#include <set>
#include <thread>
#include <unordered_map>

#include "fake_memory.hpp"

namespace fake {

// Result codes.
constexpr int SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3;
constexpr int INVALID_DEVICE = 101, INVALID_CONTEXT = 201, PEER_ACCESS_UNSUPPORTED = 217;
constexpr int INVALID_HANDLE = 400, ILLEGAL_STATE = 401, NOT_FOUND = 500;
constexpr int ILLEGAL_ADDRESS = 700, PEER_ACCESS_ALREADY_ENABLED = 704, CONTEXT_IS_DESTROYED = 709;
constexpr int MISALIGNED_ADDRESS = 716, LAUNCH_FAILED = 719, NOT_SUPPORTED = 801;
constexpr int CAPTURE_UNSUPPORTED = 900, CAPTURE_INVALIDATED = 901, CAPTURE_MERGE = 902;
constexpr int CAPTURE_UNJOINED = 904, CAPTURE_ISOLATION = 905, CAPTURE_IMPLICIT = 906, CAPTURED_EVENT = 907;

struct Refused { // a call fails with a code; `why` goes into the report unless it is empty
    int code;
    std::string why;
};
[[noreturn]] inline void refuse(int code, const std::string &why) { throw Refused{code, why}; }

struct Work { // what a launch or copy does, when it is called or each time its graph is launched
    std::string name;
    uint64_t context; // whose device runs it
    int device;
    std::string stream;
    std::vector<Access> accesses;
    std::function<void()> body;
    bool is_kernel = false;
};

struct Operation {
    Work work;
    Epoch epoch;
    std::vector<std::shared_ptr<Operation>> predecessors, followers;
    size_t waits_for = 0;
    bool is_done = false;

    std::string text(bool writes) const {
        std::string made = work.name + (writes ? " writes" : " reads");
        if (!work.stream.empty()) made += " in " + work.stream;
        return made;
    }
};
using OperationPtr = std::shared_ptr<Operation>;
using Frontier = std::set<OperationPtr>;

struct Node { // an operation of a graph
    Work work;
    std::set<int> predecessors;
    uint64_t chain; // the stream that captured it
};

struct UserObject { // destroyed with the last graph, capture or executable graph that has it
    void *owned;
    void (*release)(void *);
    ~UserObject() { // in another thread, as in the driver, where a call of the driver would not return
        std::thread([this] { is_releasing = true, release(owned); }).join();
    }
    static inline thread_local bool is_releasing = false;
};
using UserObjects = std::vector<std::shared_ptr<UserObject>>;

struct Capture {
    int mode;
    std::thread::id thread;
    std::vector<Node> nodes;
    bool is_active = true;
    std::string invalid; // why it was invalidated
    uint64_t graph = 0;  // its handle, once it was asked for
    UserObjects objects;
};

struct Place { // what a stream or event stands for: the operations so far
    Clock clock;
    Frontier frontier;
    std::shared_ptr<Capture> capture;
    std::set<int> nodes;

    void join(const Place &other) {
        fake::join(clock, other.clock);
        for (const OperationPtr &each : other.frontier)
            if (!each->is_done) frontier.insert(each);
    }
};

struct Stream : Place {
    uint64_t handle, context;
    int device, number;
    bool is_blocking, is_foreign, is_legacy;
    size_t chain;

    std::string text() const {
        return is_legacy ? "the default stream of device " + std::to_string(device)
                         : "stream " + std::to_string(number) + " of device " + std::to_string(device);
    }
};
struct Event : Place {
    uint64_t context;
};
struct Context {
    uint64_t handle;
    int device;
    int retained = 0;        // by the driver's caller
    bool is_foreign = false; // the framework or the test retains it as well
    int failed = 0;          // the code that all later calls return
    std::set<int> peers{};   // devices whose memory it may access
    uint64_t legacy = 0;
    bool is_active() const { return retained > 0 || is_foreign; }
};
struct Module {
    uint64_t context;
};
struct Function {
    uint64_t context, module;
    std::string name;
    void (*body)(const void *, uint32_t);
    const int32_t *traits;
};
struct Graph {
    std::vector<Node> nodes;
    UserObjects objects;
};
struct GraphExec : Place, Graph {
    using Graph::nodes;
    std::map<uint64_t, Epoch> chains;
};

template <class T> using Table = std::map<uint64_t, std::shared_ptr<T>>;

inline thread_local int thread_mode = 0; // what calls of this thread do to captures: 0 global, 1 of the thread, 2 relaxed

struct State {
    explicit State(int count, const uint8_t *given, uint64_t seed)
        : devices(count), memory(count), random(static_cast<std::mt19937::result_type>(seed)) {
        const double choices[] = {0, 0.1, 0.3, 0.7}; // rather late than early: late work reveals missing waits
        eagerness = choices[random() % 4];
        peers.assign(given, given + count * count);
    }
    ~State() {
        for (const OperationPtr &each : pending) each->predecessors.clear(), each->followers.clear();
    }

    int devices;
    std::vector<uint8_t> peers; // row a, column b: device a can access device b
    Memory memory;
    Shadow shadow;
    std::mt19937 random;
    double eagerness; // the probability that a call executes one more operation
    std::set<std::pair<int, int>> corrupted; // devices whose kernels read wrongly what the others own
    Clock host_clock{0};
    size_t chains = 1;
    std::map<int, int> numbers; // the streams of each device so far
    Table<Context> contexts;
    Table<Stream> streams;
    Table<Event> events;
    Table<Module> modules;
    Table<Function> functions;
    Table<Graph> graphs;
    Table<GraphExec> execs;
    Table<UserObject> user_objects;                 // those of the caller
    std::vector<std::shared_ptr<Capture>> captures; // those that have not ended
    std::set<OperationPtr> pending;
    std::vector<OperationPtr> ready;
    std::vector<std::string> reports;

    // ---- execution

    bool draw(double probability) { return std::uniform_real_distribution<>()(random) < probability; }
    void execute(size_t k) {
        const OperationPtr operation = ready[k];
        ready[k] = ready.back();
        ready.pop_back();
        if (operation->work.body) operation->work.body(), corrupt(operation->work);
        operation->work.body = nullptr;
        operation->is_done = true;
        operation->predecessors.clear();
        for (const OperationPtr &each : operation->followers)
            if (--each->waits_for == 0) ready.push_back(each);
        operation->followers.clear();
        pending.erase(operation);
    }
    // Change a byte of what a kernel writes after it has read the memory of a peer, if the test wants this.
    void corrupt(const Work &work) {
        for (const Access &read : corrupted.empty() ? std::vector<Access>() : work.accesses)
            for (const Access &each : work.accesses)
                if (const Allocation *found = memory.find(read.begin); !read.writes && each.writes && found &&
                    corrupted.count({work.device, found->device}))
                    ++*reinterpret_cast<uint8_t *>(each.begin);
    }
    void execute_some() {
        while (!ready.empty() && draw(eagerness)) execute(random() % ready.size());
    }
    // Execute what these operations need, and anything else by chance.
    void execute(const Frontier &wanted) {
        Frontier needed;
        for (std::vector<OperationPtr> open(wanted.begin(), wanted.end()); !open.empty();) {
            const OperationPtr operation = open.back();
            open.pop_back();
            if (operation->is_done || !needed.insert(operation).second) continue;
            open.insert(open.end(), operation->predecessors.begin(), operation->predecessors.end());
        }
        while (!needed.empty()) {
            const size_t k = random() % ready.size();
            if (needed.erase(ready[k]) || draw(eagerness)) execute(k);
        }
    }
    void execute_all() { execute(Frontier(pending.begin(), pending.end())); }

    // ---- queueing

    void queue(const OperationPtr &operation, const Frontier &after) {
        for (const OperationPtr &each : after) {
            if (each->is_done) continue;
            each->followers.push_back(operation);
            operation->predecessors.push_back(each);
        }
        operation->waits_for = operation->predecessors.size();
        pending.insert(operation);
        if (operation->waits_for == 0) ready.push_back(operation);
    }
    // Note the accesses of an operation, and report those that are not ordered.
    void note(const OperationPtr &operation, const Clock &clock) {
        std::vector<Shadow::Conflict> conflicts;
        for (const Access &each : operation->work.accesses)
            shadow.access(operation, operation->epoch, clock, each, conflicts);
        for (const Shadow::Conflict &each : conflicts)
            report("not ordered: " + each.earlier->text(each.earlier_writes) + ", and " + operation->text(each.writes) +
                   ", " + range_text(each.begin, each.end - each.begin));
    }
    void note_host(const Access &access, const std::string &name) {
        auto operation = std::make_shared<Operation>();
        operation->work.name = name;
        operation->work.accesses = {access};
        operation->epoch = {0, ++host_clock[0]};
        operation->is_done = true;
        note(operation, host_clock);
    }
    void report(const std::string &text) { reports.push_back(text); }

    // Make a stream's place include its implicit waits: the legacy default stream and the blocking streams of
    // its context wait for each other.
    void catch_up(Stream &stream) {
        fake::join(stream.clock, host_clock);
        if (!stream.is_blocking || stream.capture) return;
        for (auto &[handle, other] : streams)
            if (other->context == stream.context && other->is_blocking && other->is_legacy != stream.is_legacy &&
                !other->capture)
                stream.join(*other);
    }
    void queue_work(Stream &stream, Work work) {
        work.stream = stream.text();
        if (stream.capture) {
            check_capture(stream.capture);
            const int number = static_cast<int>(stream.capture->nodes.size());
            stream.capture->nodes.push_back({std::move(work), stream.nodes, stream.handle});
            stream.nodes = {number};
            return;
        }
        catch_up(stream);
        if (stream.clock.size() <= stream.chain) stream.clock.resize(stream.chain + 1);
        const Epoch epoch{stream.chain, ++stream.clock[stream.chain]};
        stream.frontier = {start(std::move(work), epoch, stream.clock, stream.frontier)};
    }
    OperationPtr start(Work work, Epoch epoch, const Clock &clock, const Frontier &after) {
        auto operation = std::make_shared<Operation>();
        operation->work = std::move(work);
        operation->epoch = epoch;
        if (!check_accesses(operation->work)) operation->work.body = nullptr, operation->work.accesses.clear();
        note(operation, clock);
        queue(operation, after);
        return operation;
    }
    void launch(GraphExec &exec, Stream &stream) {
        catch_up(stream);
        Place base = stream;
        base.join(exec);
        std::vector<Place> made;
        Place after = base;
        for (const Node &node : exec.nodes) {
            Place at;
            at.clock = base.clock;
            for (int each : node.predecessors) at.join(made[static_cast<size_t>(each)]);
            Epoch &epoch = exec.chains.at(node.chain);
            if (at.clock.size() <= epoch.chain) at.clock.resize(epoch.chain + 1);
            at.clock[epoch.chain] = ++epoch.count;
            Work work = node.work;
            work.stream = "a graph in " + stream.text() + ", from " + work.stream;
            const Frontier &before = node.predecessors.empty() ? base.frontier : at.frontier;
            at.frontier = {start(std::move(work), epoch, at.clock, before)};
            made.push_back(at);
            after.join(at);
        }
        stream.clock = exec.clock = after.clock;
        stream.frontier = exec.frontier = after.frontier;
    }
    // The host knows from now on that this is complete.
    void synchronize(const Place &place) {
        execute(place.frontier);
        fake::join(host_clock, place.clock);
    }

    // ---- memory

    bool can_access(const Context &context, int device) const {
        return device == HOST || device == context.device || context.peers.count(device);
    }
    // Return whether all accesses are within memory that the operation's context can access; report them if not.
    bool check_accesses(const Work &work) {
        Context &context = *contexts.at(work.context);
        const bool is_peer_copy = work.name == "peer copy";
        for (const Access &each : work.accesses) {
            const Allocation *found = memory.find(each.begin);
            std::string why;
            if (!found) {
                if (work.is_kernel || !memory.is_pageable(each.begin, each.nbytes)) why = "is not in an allocation";
            } else if (!found->is_live) {
                why = "was freed";
            } else if (each.begin + each.nbytes > found->begin + found->nbytes) {
                why = "is not within " + range_text(found->begin, found->nbytes);
            } else if (!is_peer_copy && !can_access(context, found->device)) {
                why = "is on device " + std::to_string(found->device) + ", to which peer access is not enabled";
            } else if (!is_peer_copy && found->device != context.device && !found->is_peer_readable()) {
                why = "is on device " + std::to_string(found->device) + ", which did not map it for its peers";
            }
            if (why.empty()) continue;
            report(work.name + " in " + work.stream + ": what it " + (each.writes ? "writes, " : "reads, ") +
                   range_text(each.begin, each.nbytes) + ", " + why);
            context.failed = ILLEGAL_ADDRESS;
            return false;
        }
        return true;
    }

    // ---- capture

    static void check_capture(const std::shared_ptr<Capture> &capture) {
        if (!capture->invalid.empty()) refuse(CAPTURE_INVALIDATED, "the capture was invalidated: " + capture->invalid);
    }
    // Fail with a code, and invalidate the captures for which `belongs` is true.
    template <class F> [[noreturn]] void invalidate(int code, const std::string &why, F belongs) {
        for (auto &each : captures)
            if (each->invalid.empty() && belongs(*each)) each->invalid = why;
        refuse(code, why);
    }
    [[noreturn]] void invalidate(int code, const std::string &why, const std::shared_ptr<Capture> &capture) {
        invalidate(code, why, [&](const Capture &each) { return &each == capture.get(); });
    }
    // The calls that cuda.h calls potentially unsafe: see cuThreadExchangeStreamCaptureMode.
    void check_unsafe() {
        const auto here = std::this_thread::get_id();
        auto forbids = [&](const Capture &each) {
            return thread_mode == 0 ? each.mode == 0 || (each.mode == 1 && each.thread == here)
                                    : thread_mode == 1 && each.mode != 2 && each.thread == here;
        };
        for (auto &each : captures)
            if (forbids(*each))
                invalidate(CAPTURE_UNSUPPORTED, "the call is not permitted while a stream is capturing", forbids);
    }
};

} // namespace fake
