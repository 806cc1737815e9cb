/* The process that holds a pod's namespaces open: it waits for ever, buries orphans, obeys TERM. */
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

static void leave(int number) {
    (void)number;
    _exit(0);
}

static void bury(int number) {
    (void)number;
    while (waitpid(-1, NULL, WNOHANG) > 0) {
    }
}

int main(void) {
    struct sigaction on_end = {.sa_handler = leave};
    struct sigaction on_child = {.sa_handler = bury, .sa_flags = SA_NOCLDSTOP};
    sigaction(SIGTERM, &on_end, NULL);
    sigaction(SIGINT, &on_end, NULL);
    sigaction(SIGCHLD, &on_child, NULL);
    for (;;) {
        pause();
    }
}
