/* Faults of a disk and of the clock that a program cannot cause from outside: a disk that is full at an exact byte, that
 * fails, or that is slow, and a clock that jumps. LD_PRELOAD puts this library before the C library in every process of a
 * run. `shim.py` compiles it and writes the settings, which all processes map, so that a fault can begin in the middle
 * of a run.
 *
 * The clock of files (st_mtime) is the kernel's and does not jump.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

struct settings {
    _Atomic int64_t clock_seconds; /* added to the real-time clock */
    _Atomic int64_t delay_us;      /* before each write and flush of a matching file */
    _Atomic int64_t room;          /* bytes that matching files may still take; -1: unlimited */
    _Atomic int64_t error;         /* errno of a write without room */
    char pattern[256];             /* text that the path of a matching file contains; empty: none */
};

static struct settings *shared;

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("FAULTS_SETTINGS");
    int file = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (file < 0) return;
    void *place = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (place != MAP_FAILED) shared = place;
}

static void *next(const char *name) { return dlsym(RTLD_NEXT, name); }

static int matches(int file) {
    char link[64], path[4096];
    if (!shared || !shared->pattern[0]) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length <= 0) return 0;
    path[length] = 0;
    return strstr(path, shared->pattern) != NULL;
}

static void wait_for_disk(void) {
    if (shared->delay_us > 0) usleep((useconds_t)shared->delay_us);
}

/* Bytes of a write that still fit. A full disk takes the first bytes of a write, and fails the next write. */
static size_t fits(size_t count) {
    int64_t room = shared->room;
    while (room >= 0) {
        int64_t taken = room < (int64_t)count ? room : (int64_t)count;
        if (atomic_compare_exchange_weak(&shared->room, &room, room - taken)) return (size_t)taken;
    }
    return count;
}

ssize_t write(int file, const void *data, size_t count) {
    static ssize_t (*real)(int, const void *, size_t);
    if (!real) real = next("write");
    if (count == 0 || !matches(file)) return real(file, data, count);
    wait_for_disk();
    size_t taken = fits(count);
    if (taken == 0) {
        errno = (int)shared->error;
        return -1;
    }
    return real(file, data, taken);
}

int fsync(int file) {
    static int (*real)(int);
    if (!real) real = next("fsync");
    if (matches(file)) {
        wait_for_disk();
        if (shared->room == 0 && shared->error == EIO) {
            errno = EIO;
            return -1;
        }
    }
    return real(file);
}

static int64_t jump(void) { return shared ? shared->clock_seconds : 0; }

int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = next("clock_gettime");
    int result = real(clock, now);
    if (result == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += jump();
    return result;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    static int (*real)(struct timeval *, void *);
    if (!real) real = next("gettimeofday");
    int result = real(now, zone);
    if (result == 0) now->tv_sec += jump();
    return result;
}

time_t time(time_t *place) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (place) *place = now.tv_sec;
    return now.tv_sec;
}

/* The kernel compares deadlines with its own clock, which does not jump. */
int pthread_cond_timedwait(pthread_cond_t *cond, pthread_mutex_t *mutex, const struct timespec *until) {
    static int (*real)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
    if (!real) real = dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
    if (!real) real = next("pthread_cond_timedwait");
    struct timespec earlier = *until;
    if (!(cond->__data.__wrefs & 2)) earlier.tv_sec -= jump(); /* bit 1: the condition uses the monotonic clock */
    return real(cond, mutex, &earlier);
}
