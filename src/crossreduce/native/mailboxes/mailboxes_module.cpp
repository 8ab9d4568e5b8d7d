// The Python class Mailboxes.
#include "module.hpp"

#include <cerrno>
#include <unistd.h>

#include "mailboxes.hpp"

std::shared_ptr<Connections> *connections_in(PyObject *object);

namespace {

constexpr int MAX_RANKS = 10000;
constexpr long WAITING = -1;

struct MailboxesObject {
    PyObject_HEAD
    Mailboxes *boxes;
    std::unordered_map<uint64_t, PyObject *> *owners; // of the memory of messages that may not be complete
    int process;
};

MailboxesObject *boxes_of(PyObject *object) { return reinterpret_cast<MailboxesObject *>(object); }

// During its life, no other thread closes the mailboxes.
struct Use {
    Mailboxes *boxes;
    explicit Use(PyObject *object) : boxes(boxes_of(object)->boxes) {
        if (!boxes->enter()) {
            boxes = nullptr;
            value_error("the mailboxes are closed");
        }
    }
    Use(const Use &) = delete;
    Use &operator=(const Use &) = delete;
    ~Use() {
        if (boxes != nullptr) boxes->leave();
    }
    explicit operator bool() const { return boxes != nullptr; }
};

void release_owner(MailboxesObject *self, uint64_t id) {
    const auto found = self->owners->find(id);
    if (found == self->owners->end()) return;
    PyObject *owner = found->second;
    self->owners->erase(found);
    Py_DECREF(owner); // last, since this may run any code
}

// Release the objects of forgotten messages that are complete now.
void release_completed(MailboxesObject *self, Mailboxes &boxes) {
    for (const uint64_t id : boxes.completed()) release_owner(self, id);
}

PyObject *boxes_new(PyTypeObject *type, PyObject *args, PyObject *) {
    int fd, rank, ranks, may_read;
    long long offset;
    double spin_s;
    if (!PyArg_ParseTuple(args, "iLiidp", &fd, &offset, &rank, &ranks, &spin_s, &may_read)) return nullptr;
    if (ranks < 1 || rank < 0 || rank >= ranks || ranks > MAX_RANKS || offset < 0 || !(spin_s >= 0 && spin_s < 1))
        return PyErr_Format(PyExc_ValueError, "the arguments are (fd, offset, rank, ranks, spin_s, may_read), with "
                                              "0 <= rank < ranks and spin_s from 0 to 1");
    return make_object<MailboxesObject>(type, [&](MailboxesObject &self) {
        self.process = getpid();
        self.owners = new std::unordered_map<uint64_t, PyObject *>();
        self.boxes = Mailboxes::map(fd, offset, rank, ranks, static_cast<int64_t>(spin_s * 1e9), may_read != 0);
        if (self.boxes == nullptr) PyErr_SetFromErrno(PyExc_OSError);
        return self.boxes != nullptr;
    });
}

void close_boxes(MailboxesObject *self) {
    if (!without_lock(false, [&] { return self->boxes->close(); })) return; // it may still wait for threads that read
    const auto owners = std::exchange(*self->owners, {});
    for (const auto &[id, owner] : owners) Py_DECREF(owner);
}

void boxes_dealloc(PyObject *object) {
    MailboxesObject *self = boxes_of(object);
    if (self->boxes != nullptr && self->process == getpid()) { // a forked child has neither the memory nor the helper
        close_boxes(self);
        delete self->boxes;
    }
    delete self->owners;
    free_object(object);
}

template <int64_t (*NBYTES)(int)> PyObject *boxes_nbytes(PyObject *, PyObject *args) {
    int ranks;
    if (!PyArg_ParseTuple(args, "i", &ranks)) return nullptr;
    if (ranks < 1 || ranks > MAX_RANKS) return PyErr_Format(PyExc_ValueError, "the number of ranks is out of range");
    return PyLong_FromLongLong(NBYTES(ranks));
}

template <uint64_t (Mailboxes::*BEGIN)(int, int64_t, char *, uint64_t), int LEAST>
PyObject *begin_message(PyObject *object, PyObject *args) {
    int peer;
    long long tag;
    unsigned long long address, nbytes;
    PyObject *owner;
    if (!PyArg_ParseTuple(args, "iLKKO", &peer, &tag, &address, &nbytes, &owner)) return nullptr;
    const Use use(object);
    if (!use) return nullptr;
    if (peer < LEAST || peer >= use.boxes->everyone()) return PyErr_Format(PyExc_ValueError, "the rank is out of range");
    MailboxesObject *self = boxes_of(object);
    try {
        release_completed(self, *use.boxes);
        self->owners->reserve(self->owners->size() + 1);
        const auto begin = [&] { return (use.boxes->*BEGIN)(peer, tag, reinterpret_cast<char *>(address), nbytes); };
        // A message with another host calls the system, and may wait for a thread that reads from a connection.
        bool had_memory = use.boxes->everyone() == use.boxes->ranks;
        const uint64_t id = had_memory ? begin() : without_lock(uint64_t{0}, [&] {
            const uint64_t made = begin();
            had_memory = true;
            return made;
        });
        if (!had_memory) return PyErr_NoMemory();
        if (id != 0 && use.boxes->is_pending(id)) {
            (*self->owners)[id] = owner;
            Py_INCREF(owner);
        }
        return PyLong_FromUnsignedLongLong(id);
    } catch (const std::exception &) {
        return PyErr_NoMemory();
    }
}

PyObject *boxes_wait(PyObject *object, PyObject *args) {
    unsigned long long id;
    double slice_s;
    if (!PyArg_ParseTuple(args, "Kd", &id, &slice_s)) return nullptr;
    const Use use(object);
    if (!use) return nullptr;
    if (!(slice_s >= 0 && slice_s <= 1e6)) return PyErr_Format(PyExc_ValueError, "slice_s must be from 0 to 1e6 seconds");
    int source = ANY_RANK;
    uint64_t nbytes = 0;
    const MessageStatus status = without_lock(MessageStatus::waiting, [&] {
        return use.boxes->wait(id, static_cast<int64_t>(slice_s * 1e9), source, nbytes);
    });
    release_completed(boxes_of(object), *use.boxes);
    if (status == MessageStatus::no_memory) return PyErr_NoMemory();
    if (status == MessageStatus::unknown) Py_RETURN_NONE;
    if (status == MessageStatus::waiting) return PyLong_FromLong(WAITING);
    if (status == MessageStatus::done) return PyLong_FromLong(source);
    return Py_BuildValue("(iK)", source, static_cast<unsigned long long>(nbytes));
}

PyObject *release(PyObject *object, PyObject *args, bool withdraw) {
    unsigned long long id;
    if (!PyArg_ParseTuple(args, "K", &id)) return nullptr;
    const Use use(object);
    if (!use) return nullptr;
    const bool released = !withdraw || without_lock(false, [&] { return use.boxes->withdraw(id); });
    use.boxes->forget(id);
    if (!use.boxes->is_pending(id)) release_owner(boxes_of(object), id);
    release_completed(boxes_of(object), *use.boxes);
    return PyBool_FromLong(released);
}

PyObject *boxes_forget(PyObject *object, PyObject *args) { return release(object, args, false); }
PyObject *boxes_withdraw(PyObject *object, PyObject *args) { return release(object, args, true); }

PyObject *boxes_mood(PyObject *object, PyObject *args) {
    int rank;
    if (!PyArg_ParseTuple(args, "i", &rank)) return nullptr;
    const Use use(object);
    if (!use) return nullptr;
    if (rank < 0 || rank >= use.boxes->everyone()) return PyErr_Format(PyExc_ValueError, "the rank is out of range");
    return PyLong_FromLong(static_cast<long>(without_lock(OPEN, [&] { return use.boxes->mood(rank); })));
}

PyObject *boxes_source(PyObject *object, PyObject *args) {
    unsigned long long id;
    if (!PyArg_ParseTuple(args, "K", &id)) return nullptr;
    const Use use(object);
    if (!use) return nullptr;
    return PyLong_FromLong(without_lock(ANY_RANK, [&] { return use.boxes->source_of(id); }));
}

PyObject *boxes_why(PyObject *object, PyObject *args) {
    int rank;
    if (!PyArg_ParseTuple(args, "i", &rank)) return nullptr;
    const Use use(object);
    if (!use) return nullptr;
    if (rank < use.boxes->ranks || rank >= use.boxes->everyone()) return PyErr_Format(PyExc_ValueError, "the rank is out of range");
    const std::string why = without_lock(std::string(), [&] { return use.boxes->why(rank); });
    return PyUnicode_DecodeUTF8(why.data(), static_cast<Py_ssize_t>(why.size()), "replace");
}

PyObject *boxes_give_up(PyObject *object, PyObject *) {
    const Use use(object);
    if (!use) return nullptr;
    without_lock(0, [&] { return use.boxes->give_up(), 0; });
    Py_RETURN_NONE;
}

PyObject *boxes_reach(PyObject *object, PyObject *args) {
    PyObject *given, *ranks_given;
    std::vector<int> ranks;
    if (!PyArg_ParseTuple(args, "OO", &given, &ranks_given) || !read_ints(ranks_given, ranks)) return nullptr;
    const Use use(object);
    if (!use) return nullptr;
    if (use.boxes->everyone() != use.boxes->ranks) return value_error("reach was called before"), nullptr;
    const std::shared_ptr<Connections> *found = connections_in(given);
    if (found == nullptr) return nullptr;
    for (int &each : ranks) each = (*found)->index_of(each);
    use.boxes->reach(*found, ranks);
    Py_RETURN_NONE;
}

PyObject *boxes_close(PyObject *object, PyObject *) {
    close_boxes(boxes_of(object));
    Py_RETURN_NONE;
}

PyMethodDef boxes_methods[] = {
    {"nbytes", boxes_nbytes<Mailboxes::nbytes>, METH_VARARGS | METH_STATIC,
     "nbytes(ranks): return the size of the memory for this many ranks."},
    {"head_nbytes", boxes_nbytes<Mailboxes::head_nbytes>, METH_VARARGS | METH_STATIC,
     "head_nbytes(ranks): return how many bytes at its start must be allocated. Ranks allocate more when they send."},
    {"reach", locked<boxes_reach>, METH_VARARGS,
     "reach(connections, ranks): also exchange messages with ranks of other hosts, whose numbers here follow those of this "
     "host, in this order. A rank without a connection cannot be reached."},
    {"send", locked<begin_message<&Mailboxes::send, 0>>, METH_VARARGS,
     "send(dst, tag, address, nbytes, owner): begin to send; return the message's number, or 0 if it is complete. The "
     "owner of the memory is referenced until the message is complete."},
    {"receive", locked<begin_message<&Mailboxes::receive, ANY_RANK>>, METH_VARARGS,
     "receive(src, tag, address, nbytes, owner): begin to receive, from any rank if src is -1; return the message's number."},
    {"wait", locked<boxes_wait>, METH_VARARGS,
     "wait(number, slice_s): wait for a message. Returns -1: it is not complete; the other rank; or (rank, nbytes) of a "
     "message of another size, which was dropped; None: the number is unknown."},
    {"forget", locked<boxes_forget>, METH_VARARGS, "forget(number): free the result of a message as soon as it is complete."},
    {"withdraw", locked<boxes_withdraw>, METH_VARARGS,
     "withdraw(number): forget a message; if it is not complete, end it. Returns False if the other rank may still read "
     "its memory."},
    {"mood", locked<boxes_mood>, METH_VARARGS,
     "mood(rank): return 0, 1 if the rank has closed its mailboxes, or 2 if a message of it has timed out, or the "
     "connection to it was lost."},
    {"source", locked<boxes_source>, METH_VARARGS,
     "source(number): return the other rank of a message that has begun to move, or -1: it is not known yet."},
    {"why", locked<boxes_why>, METH_VARARGS, "why(rank): return why the connection to a rank of another host was lost, or \"\"."},
    {"give_up", locked<boxes_give_up>, METH_NOARGS, "Tell the other ranks that a message of this rank has timed out."},
    {"close", locked<boxes_close>, METH_NOARGS, "End all messages; afterwards every other method raises ValueError."},
    {nullptr, nullptr, 0, nullptr}};

PyType_Slot boxes_slots[] = {{Py_tp_new, reinterpret_cast<void *>(boxes_new)},
                             {Py_tp_dealloc, reinterpret_cast<void *>(boxes_dealloc)},
                             {Py_tp_methods, boxes_methods},
                             {0, nullptr}};

} // namespace

int add_mailboxes(PyObject *module) {
    return add_class<MailboxesObject>(module, "crossreduce.kernels._native.Mailboxes", boxes_slots);
}
