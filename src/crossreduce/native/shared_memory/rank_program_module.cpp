// The Python class RankProgram.
#include "rank_program_module.hpp"

#include <algorithm>

namespace {

constexpr int MAX_REGIONS = 1000000;

struct ProgramObject {
    PyObject_HEAD
    RankProgram *program;
    PyObject *kernels; // a list that owns references to them
};

// Read [(region, offset), ...]; each refers to `nbytes` bytes.
bool read_refs(PyObject *list, size_t count, int64_t nbytes, std::vector<BufferRef> &refs, RankProgram &program) {
    if (PySequence_Size(list) != static_cast<Py_ssize_t>(count))
        return !PyErr_Occurred() && value_error("the number of operands of an instruction is not its kernel's");
    for (size_t k = 0; k < count; k++) {
        Ref one(item(list, static_cast<Py_ssize_t>(k)));
        std::vector<int64_t> fields;
        if (!one || !read_ints(one.object, fields)) return false;
        if (fields.size() != 2 || fields[1] < 0 || fields[1] > MAX_NBYTES || fields[0] < -MAX_REGIONS ||
            fields[0] >= PEER_BUFFER + READABLE_BUFFERS * MAX_RANKS || (fields[0] > MAX_REGIONS && fields[0] < PEER_BUFFER))
            return value_error("an operand of an instruction is (region, offset)");
        const int region = static_cast<int>(fields[0]);
        if (region >= PEER_BUFFER) {
            program.peers = std::max(program.peers, (region - PEER_BUFFER) / READABLE_BUFFERS + 1);
        } else if (region >= 0) {
            program.slots = std::max(program.slots, region + 1);
            program.slot_nbytes = std::max(program.slot_nbytes, fields[1] + nbytes);
        } else {
            program.buffers = std::max(program.buffers, ~region + 1);
        }
        refs.push_back({region, fields[1]});
    }
    return true;
}

// Read [(rank, (region, offset), nbytes), ...].
bool read_parts(PyObject *list, std::vector<HostMessages::Part> &parts, RankProgram &program) {
    return read_each(list, [&](PyObject *fields) {
        int rank;
        PyObject *place;
        long long nbytes;
        if (!PyTuple_Check(fields)) return value_error("a part of a message is (rank, place, nbytes)");
        if (!PyArg_ParseTuple(fields, "iOL", &rank, &place, &nbytes)) return false;
        if (nbytes < 0 || nbytes > MAX_NBYTES) return value_error("the size of a message is out of range");
        Ref places(PyTuple_Pack(1, place));
        std::vector<BufferRef> refs;
        if (!places || !read_refs(places.object, 1, nbytes, refs, program)) return false;
        if (refs[0].region >= PEER_BUFFER) return value_error("a message cannot be in the memory of another rank");
        parts.push_back({rank, refs[0], nbytes});
        return true;
    });
}

// Read () for a check, (most, reads) for parts to put, (most, reads, ranks) to take, or (sends, receives, compared, digest, room, sent, received).
bool read_messages(PyObject *fields, RankProgram &program, std::vector<Instruction> &stage) {
    stage.push_back({nullptr, {}, {}, false});
    if (PyTuple_Size(fields) == 0) return true;
    if (PyTuple_Size(fields) < 4) {
        long long most;
        int reads, ranks = 0;
        if (!PyArg_ParseTuple(fields, "Lp|i", &most, &reads, &ranks)) return false;
        if (most < 0 || ranks < 0 || ranks > MAX_RANKS) return value_error("the size of a part or the ranks are out of range");
        stage.back().messages = ranks == 0 ? PUT_PARTS : TAKE_PARTS;
        program.has_parts = true, program.most_part = most, program.reads_parts = reads != 0;
        program.buffers = 3, program.slots = std::max(program.slots, ranks), program.peers = reads != 0 ? ranks : 0;
        return true;
    }
    PyObject *sends, *receives, *compared;
    const char *digest;
    Py_ssize_t length;
    long long room;
    long long sent, received;
    if (!PyArg_ParseTuple(fields, "OOOy#LLL", &sends, &receives, &compared, &digest, &length, &room, &sent, &received)) return false;
    stage.back().messages = static_cast<int>(program.messages.size());
    HostMessages &messages = program.messages.emplace_back();
    if (!read_parts(sends, messages.sends, program) || !read_parts(receives, messages.receives, program) ||
        !read_ints(compared, messages.compared))
        return false;
    messages.digest.assign(digest, static_cast<size_t>(length));
    messages.room = room, messages.sent = sent, messages.received = received;
    if (messages.digest.size() != DIGEST_NBYTES || room < 0 || room > MAX_NBYTES)
        return value_error("the digest or the room of a message is invalid");
    for (const auto *parts : {&messages.sends, &messages.receives}) {
        for (const int rank : messages.compared) {
            int64_t nbytes = 0;
            for (const HostMessages::Part &part : *parts) nbytes += part.rank == rank ? part.nbytes : 0;
            if (nbytes > room) return value_error("a first message has more data than room");
        }
    }
    return true;
}

bool read_instruction(PyObject *fields, ProgramObject &self, std::vector<Instruction> &stage) {
    PyObject *kernel_object, *sources, *results;
    int streaming;
    if (PyTuple_Check(fields) && PyTuple_Size(fields) != 4) return read_messages(fields, *self.program, stage);
    if (!PyTuple_Check(fields)) return value_error("an instruction is (kernel, sources, results, streaming)");
    if (!PyArg_ParseTuple(fields, "OOOp", &kernel_object, &sources, &results, &streaming)) return false;
    const Kernel *kernel = kernel_of(kernel_object);
    if (kernel == nullptr || PyList_Append(self.kernels, kernel_object) < 0) return false;
    if (kernel->sizes.size() != 1) return value_error("the kernel of an instruction must have one tensor");
    stage.push_back({kernel, {}, {}, streaming != 0});
    const int64_t size = kernel->sizes[0];
    const int64_t in = size * static_cast<int64_t>(ITEMSIZES[kernel->dtype]);
    const int64_t out = size * static_cast<int64_t>(ITEMSIZES[kernel->result]);
    if (!read_refs(sources, static_cast<size_t>(kernel->sources), in, stage.back().sources, *self.program) ||
        !read_refs(results, static_cast<size_t>(kernel->results), out, stage.back().results, *self.program))
        return false;
    const auto is_peer = [](const BufferRef &ref) { return ref.region >= PEER_BUFFER; };
    const auto &from = stage.back().sources, &to = stage.back().results;
    const bool copies = kernel->only_copies && from.size() == 1 && to.size() == 1;
    if (std::any_of(to.begin(), to.end(), is_peer) || (!copies && std::any_of(from.begin(), from.end(), is_peer)))
        return value_error("another rank's buffer can only be the source of a copy");
    stage.back().phase = phase_of(stage.back());
    return true;
}

PyObject *program_new(PyTypeObject *type, PyObject *args, PyObject *) {
    return make_object<ProgramObject>(type, [&](ProgramObject &self) {
        PyObject *stages;
        int kind = 0;
        long long nbytes = 0;
        self.program = new RankProgram();
        self.kernels = PyList_New(0);
        if (self.kernels == nullptr || !PyArg_ParseTuple(args, "O|iL", &stages, &kind, &nbytes)) return false;
        if (kind < 0 || kind >= CALL_KINDS || nbytes < 0 || nbytes > MAX_NBYTES)
            return value_error("the kind or the bytes of a call are out of range");
        self.program->kind = kind, self.program->nbytes = nbytes;
        const auto read_stage = [&](PyObject *stage) {
            auto &instructions = self.program->stages.emplace_back();
            return read_each(stage, [&](PyObject *one) { return read_instruction(one, self, instructions); });
        };
        if (!read_each(stages, read_stage)) return false;
        return self.program->stages.size() >= 2 ||
               value_error("a rank program needs at least two stages, since ops end with a barrier");
    });
}

void program_dealloc(PyObject *object) {
    auto *self = reinterpret_cast<ProgramObject *>(object);
    delete self->program;
    Py_XDECREF(self->kernels);
    free_object(object);
}

} // namespace

const RankProgram *program_of(PyObject *object) {
    if (PyType_GetSlot(Py_TYPE(object), Py_tp_dealloc) == reinterpret_cast<void *>(program_dealloc))
        return reinterpret_cast<ProgramObject *>(object)->program;
    PyErr_SetString(PyExc_TypeError, "the first argument is not a RankProgram");
    return nullptr;
}

int add_rank_program(PyObject *module) {
    return add_class<ProgramObject>(module, "crossreduce.kernels._native.RankProgram", program_new, program_dealloc, nullptr);
}
