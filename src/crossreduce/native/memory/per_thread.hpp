// One object per thread.
#pragma once

#include <cstdlib>
#include <new>
#include <pthread.h>

// An object of T for each thread that asks for it. It is deleted when the thread ends. `thread_local` would not do, nor
// would `new`: if there is no memory when a thread first uses such a variable of a library that was loaded at run time,
// glibc ends the process ("cannot allocate memory for thread-local data: ABORT"), and exceptions use such a variable.
template <class T> class PerThread {
  public:
    PerThread() : has_key(pthread_key_create(&key, remove) == 0) {}

    // Return the calling thread's object, or null if there is no memory for it.
    T *get() const {
        if (!has_key) return nullptr;
        if (void *object = pthread_getspecific(key)) return static_cast<T *>(object);
        void *memory = std::malloc(sizeof(T));
        if (memory == nullptr) return nullptr;
        T *object = new (memory) T();
        if (pthread_setspecific(key, object) == 0) return object;
        remove(object);
        return nullptr;
    }

  private:
    static void remove(void *object) {
        static_cast<T *>(object)->~T();
        std::free(object);
    }

    pthread_key_t key = 0;
    bool has_key;
};
