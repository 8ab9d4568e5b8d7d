// After refuse(), memory can be allocated in the thread that called it only. Stands for a process without memory.
#include <cstddef>
#include <pthread.h>

extern "C" {
void *__libc_malloc(size_t);
void *__libc_calloc(size_t, size_t);
void *__libc_memalign(size_t, size_t);

static volatile bool refused = false;
static pthread_t allowed;

static bool is_refused() { return refused && !pthread_equal(pthread_self(), allowed); }

void refuse() {
    allowed = pthread_self();
    refused = true;
}

void *malloc(size_t nbytes) { return is_refused() ? nullptr : __libc_malloc(nbytes); }
void *calloc(size_t count, size_t nbytes) { return is_refused() ? nullptr : __libc_calloc(count, nbytes); }
int posix_memalign(void **memory, size_t alignment, size_t nbytes) {
    *memory = is_refused() ? nullptr : __libc_memalign(alignment, nbytes);
    return *memory == nullptr ? 12 : 0; // ENOMEM
}
}
