// Bells without threads: what each of several threads would see.
#include "bells.hpp"

#include <cstdio>
#include <cstdlib>
#include <poll.h>

namespace {

bool is_rung(const Bells::Bell &bell) {
    pollfd polled = {bell.fd, POLLIN, 0};
    return poll(&polled, 1, 0) == 1;
}

void require(bool holds, const char *what) {
    if (holds) return;
    std::printf("wrong: %s\n", what);
    std::exit(1);
}

} // namespace

int main() {
    Bells bells;
    const Bells::Bell first(bells), second(bells);
    require(!is_rung(first) && !is_rung(second), "a bell was rung before");
    bells.ring();
    require(is_rung(first), "the first thread was not woken");
    first.reset(); // before the second thread has looked
    require(is_rung(second), "the second thread was not woken");
    second.reset();
    require(!is_rung(first) && !is_rung(second), "a bell was not reset");
    int used = -1;
    {
        const Bells::Bell third(bells);
        used = third.fd;
        bells.ring();
    }
    const Bells::Bell fourth(bells); // has the descriptor of the third one
    require(fourth.fd == used && !is_rung(fourth), "a new thread was woken by an earlier ring");
    std::printf("all were woken\n");
}
