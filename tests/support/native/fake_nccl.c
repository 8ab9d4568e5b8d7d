// A library with NCCL's functions that runs all ranks of one process on host memory, for tests without GPUs.
//
// It reports every misuse: a rank that is missing in a group, ranks that disagree, arrays or streams of another device,
// two threads at once, communicators that do not exist any more. Any call can be made to fail. A test tells it with
// fake_own which memory belongs to which device; stream s belongs to device s / 4096 - 1. With fake_polls(n),
// communicators do not block: what a call begins is done when their state was asked n times.
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MOST = 64, OPS = 4096, BLOCKS = 1 << 16 };
enum { INVALID_USAGE = 5, IN_PROGRESS = 7 };

typedef struct Clique Clique;
typedef struct { Clique *clique; int rank, device, dead, state; } Comm;
struct Clique { int size; Comm ranks[MOST]; };
typedef struct { int kind, type, op, root; size_t count; const void *sent; void *received; Comm *comm; } Op;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static char report[4096], called[1 << 20];
static const char *failing = "";
static int failing_at, failing_code, version = 22703, live, open_groups, polls, polls_left, pending;
static struct { uintptr_t start, stop; int device; } blocks[BLOCKS];
static int block_count;
static __thread int depth, count, faulty;
static __thread Op ops[OPS];
static Op begun[OPS];  // the calls of the group that is not done
static int execute(Op *calls, int count);

static int wrong(const char *format, ...) {
    char text[256];
    va_list list;
    va_start(list, format);
    vsnprintf(text, sizeof text, format, list);
    va_end(list);
    pthread_mutex_lock(&mutex);
    strncat(report, text, sizeof report - strlen(report) - 2);
    strcat(report, "\n");
    pthread_mutex_unlock(&mutex);
    return INVALID_USAGE;
}

// Note a call; return the error that it is to fail with.
static int enter(const char *name) {
    int code = 0;
    pthread_mutex_lock(&mutex);
    if (strlen(called) + strlen(name) + 2 < sizeof called) strcat(strcat(called, name), "\n");
    if (!strcmp(name, failing) && --failing_at < 0) {
        failing = "";
        code = failing_code;
    }
    pthread_mutex_unlock(&mutex);
    return code;
}

void fake_reset(void) {
    report[0] = called[0] = 0;
    failing = "";
    version = 22703;
    block_count = polls = polls_left = pending = 0;
}
void fake_fail(const char *name, int at, int code) { failing_at = at, failing_code = code, failing = strdup(name); }
void fake_own(uintptr_t start, size_t size, int device) {
    pthread_mutex_lock(&mutex);
    if (block_count < BLOCKS) {
        blocks[block_count].start = start, blocks[block_count].stop = start + size;
        blocks[block_count++].device = device;
    } else {
        strcpy(report, "too many blocks\n");
    }
    pthread_mutex_unlock(&mutex);
}
void fake_polls(int number) { polls = number; }
void fake_version(int number) { version = number; }
const char *fake_report(void) { return report; }
const char *fake_called(void) { return called; }
void fake_clear(void) { report[0] = 0; }
void fake_forget(void) { called[0] = 0; }
int fake_live(void) { return live; }

// The newest block counts: memory of a freed array is used again.
int fake_owner(uintptr_t start, size_t size) {
    int found = -1;
    pthread_mutex_lock(&mutex);
    for (int k = block_count; k-- && found < 0;)
        if (blocks[k].start <= start && start + size <= blocks[k].stop) found = blocks[k].device;
    pthread_mutex_unlock(&mutex);
    return found;
}

const char *ncclGetErrorString(int result) {
    return result == 1 ? "unhandled cuda error" : result == INVALID_USAGE ? "invalid usage" : "another error";
}
int ncclGetVersion(int *number) {
    *number = version;
    return enter("ncclGetVersion");
}

int ncclCommInitAll(Comm **comms, int size, const int *devices) {
    int code = enter("ncclCommInitAll");
    if (code) return code;
    if (size < 2 || size > MOST) return wrong("a communicator of %d ranks", size);
    Clique *clique = calloc(1, sizeof *clique);  // never freed, so that a use after destruction is found
    clique->size = size;
    for (int k = 0; k < size; k++) {
        for (int j = 0; j < k; j++)
            if (devices[j] == devices[k]) return wrong("device %d twice", devices[k]);
        clique->ranks[k] = (Comm){clique, k, devices[k], 0, 0};
        comms[k] = &clique->ranks[k];
    }
    __sync_fetch_and_add(&live, size);
    return (polls_left = polls) ? IN_PROGRESS : 0;
}

static int end(Comm *comm, const char *name) {
    int code = enter(name);
    if (comm->dead) return wrong("%s of a destroyed communicator", name);
    if (depth) return wrong("%s inside a group", name);
    comm->dead = 1;
    polls_left = pending = 0;
    __sync_fetch_and_sub(&live, 1);
    return code;
}
int ncclCommDestroy(Comm *comm) { return end(comm, "ncclCommDestroy"); }
int ncclCommAbort(Comm *comm) { return end(comm, "ncclCommAbort"); }

int ncclCommGetAsyncError(Comm *comm, int *state) {
    *state = 0;
    if (comm->dead) return wrong("ncclCommGetAsyncError of a destroyed communicator");
    if (polls_left && --polls_left) *state = IN_PROGRESS;
    else if (pending) *state = execute(begun, pending), pending = 0;
    if (enter("state")) *state = 1;  // an error that a test injects into the communicator, not into the call
    return enter("ncclCommGetAsyncError");
}

int ncclGroupStart(void) {
    int code = enter("ncclGroupStart");
    if (code) return code;
    if (depth++) return wrong("a group inside a group");
    if (polls_left) return wrong("a group before the last one is done");
    count = faulty = 0;
    if (__sync_fetch_and_add(&open_groups, 1)) wrong("two groups at once");
    return 0;
}

static const size_t SIZES[] = {1, 1, 4, 4, 8, 8, 2, 4, 8};
static const char *const KINDS[] = {"ncclAllReduce", "ncclReduce", "ncclBroadcast"};
enum { ALL_REDUCE, REDUCE, BROADCAST };

static int add(Op op, const void *stream) {
    const char *name = KINDS[op.kind];
    int code = enter(name), device = op.comm->device, rank = op.comm->rank;
    if (code) return faulty = code;
    size_t size = op.count * SIZES[op.type];
    if (!depth) return wrong("%s outside of a group", name);
    if (op.comm->dead) return wrong("%s on a destroyed communicator", name);
    if (count == OPS || op.type == 6 || op.type > 8 || !op.count) return wrong("%s: arguments", name);
    if ((int)((uintptr_t)stream / 4096) - 1 != device) return wrong("%s: device %d has another's stream", name, device);
    if (op.kind != BROADCAST || rank == op.root)
        if (fake_owner((uintptr_t)op.sent, size) != device) return wrong("%s: device %d sends another's", name, device);
    if (op.kind != REDUCE || rank == op.root)
        if (fake_owner((uintptr_t)op.received, size) != device) return wrong("%s: device %d writes another's", name, device);
    ops[count++] = op;
    return 0;
}
int ncclAllReduce(const void *sent, void *received, size_t size, int type, int op, Comm *comm, void *stream) {
    return add((Op){ALL_REDUCE, type, op, -1, size, sent, received, comm}, stream);
}
int ncclReduce(const void *sent, void *received, size_t size, int type, int op, int root, Comm *comm, void *stream) {
    return add((Op){REDUCE, type, op, root, size, sent, received, comm}, stream);
}
int ncclBroadcast(const void *sent, void *received, size_t size, int type, int root, Comm *comm, void *stream) {
    return add((Op){BROADCAST, type, 0, root, size, sent, received, comm}, stream);
}

#define REDUCE_AS(T) \
    for (size_t i = 0; i < op->count; i++) { \
        T total = 0; \
        for (int k = size; k--;) {  /* the last rank first: NCCL promises no order */ \
            T x = ((const T *)ranks[k]->sent)[i]; \
            if (op->op == 4) x = (T)(x * (T)(1.0 / size)); \
            if (k == size - 1) total = x; \
            else if (op->op == 0 || op->op == 4) total = (T)(total + x); \
            else if (op->op == 1) total = (T)(total * x); \
            else if (op->op == 2 ? x > total : x < total) total = x; \
        } \
        ((T *)result)[i] = total; \
    }

static int run(Op **ranks, int size) {
    const Op *op = ranks[0];
    for (int k = 1; k < size; k++)
        if (ranks[k]->kind != op->kind || ranks[k]->type != op->type || ranks[k]->op != op->op ||
            ranks[k]->root != op->root || ranks[k]->count != op->count)
            return wrong("%s: ranks 0 and %d disagree", KINDS[op->kind], k);
    if (op->op == 4 && op->type < 6) return wrong("an average of integers");
    size_t nbytes = op->count * SIZES[op->type];
    void *result = malloc(nbytes);
    if (op->kind == BROADCAST) memcpy(result, ranks[op->root]->sent, nbytes);
    else switch (op->type) {
        case 0: REDUCE_AS(int8_t) break;
        case 1: REDUCE_AS(uint8_t) break;
        case 2: case 3: REDUCE_AS(uint32_t) break;
        case 4: case 5: REDUCE_AS(uint64_t) break;
        case 7: REDUCE_AS(float) break;
        case 8: REDUCE_AS(double) break;
    }
    if (op->kind != BROADCAST && op->op > 1 && (op->type == 2 || op->type == 4)) {  // signed minimum and maximum
        if (op->type == 2) { REDUCE_AS(int32_t) } else { REDUCE_AS(int64_t) }
    }
    for (int k = 0; k < size; k++)
        if (op->kind != REDUCE || k == op->root) memcpy(ranks[k]->received, result, nbytes);
    free(result);
    return 0;
}

int ncclGroupEnd(void) {
    int code = enter("ncclGroupEnd");
    if (!depth) return wrong("ncclGroupEnd outside of a group");
    depth = 0;
    usleep(200);  // time for another thread to be noticed
    if (!code) code = faulty;  // as in NCCL, an error of a call inside a group is that of the group: nothing runs
    if (!code && polls && count) {
        memcpy(begun, ops, sizeof *ops * (size_t)(pending = count));
        polls_left = polls, code = IN_PROGRESS;
    } else if (!code) {
        code = execute(ops, count);
    }
    __sync_fetch_and_sub(&open_groups, 1);
    return code;
}

static int execute(Op *calls, int left) {
    int code = 0;
    while (!code && left) {  // the first call of the first communicator, with the first call of each other rank
        Clique *clique = calls[0].comm->clique;
        Op *ranks[MOST] = {0};
        for (int k = 0; k < left; k++)
            if (calls[k].comm->clique == clique && !ranks[calls[k].comm->rank]) ranks[calls[k].comm->rank] = &calls[k];
        for (int k = 0; k < clique->size && !code; k++)
            if (!ranks[k]) code = wrong("rank %d of %d is missing", k, clique->size);
        if (!code) code = run(ranks, clique->size);
        int kept = 0;
        for (int k = 0; k < left; k++)
            if (calls[k].comm->clique != clique || ranks[calls[k].comm->rank] != &calls[k]) calls[kept++] = calls[k];
        left = kept;
    }
    return code;
}
