/* Faults of the file system and kills, between a process and the C library.
 *
 * `LD_PRELOAD` puts this library in front of the C library. It does nothing until `chaos_arm` names a file with a plan.
 * The file is mapped by a process and its forks, which therefore count together. A plan either records each call under
 * a folder, or lets the n-th matching call fail or kill. `plan.py` has the same structure.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum { READS = 1, OPENS = 2, WRITES = 4, SYNCS = 8, RENAMES = 16, MAKES = 32, REMOVES = 64 };
enum { ITSELF, LAUNCHER, ALL };
enum { MOST_PIDS = 1024 };

struct plan {
    int32_t records;
    int32_t depth, rank; /* of the process: 0 the launcher, 1 a rank, 2 its children; rank -1: none */
    int32_t calls;       /* a mask */
    int32_t nth;         /* the matching call that fails, from 1 */
    int32_t error;       /* errno; 0: a kill */
    int32_t target;
    int32_t lasting; /* a mask of the calls under `disk` that fail from then on */
    int32_t count, fired;
    int32_t launcher, num_pids, pids[MOST_PIDS];
    char root[512], place[512], disk[512];
};

static struct plan *plan;
static int depth, log_file = -1;
static __thread int inside;

static void note_pid(void) {
    int index = __atomic_fetch_add(&plan->num_pids, 1, __ATOMIC_SEQ_CST);
    if (index < MOST_PIDS) plan->pids[index] = getpid();
}

static void in_child(void) {
    if (plan) {
        depth++;
        note_pid();
    }
}

int chaos_arm(const char *path) {
    int file = syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CLOEXEC, 0);
    if (file < 0) return errno;
    void *mapped = mmap(NULL, sizeof(struct plan), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    syscall(SYS_close, file);
    if (mapped == MAP_FAILED) return errno;
    plan = mapped;
    plan->launcher = getpid();
    note_pid();
    pthread_atfork(NULL, NULL, in_child);
    if (plan->records) {
        char name[600];
        snprintf(name, sizeof name, "%s.log", path);
        int opened = syscall(SYS_openat, AT_FDCWD, name, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
        log_file = syscall(SYS_fcntl, opened, F_DUPFD_CLOEXEC, 900);
        syscall(SYS_close, opened);
    }
    return 0;
}

static int own_rank(void) {
    const char *rank = getenv("RANK");
    return rank && *rank ? atoi(rank) : -1;
}

/* Kill once, by this plan: this process, the launcher, or all processes of the run. */
int chaos_kill(int target, int pid) {
    if (!plan || __atomic_exchange_n(&plan->fired, 1, __ATOMIC_SEQ_CST)) return 0;
    if (target == ALL) {
        kill(plan->launcher, SIGKILL);
        for (int index = 0; index < plan->num_pids && index < MOST_PIDS; index++)
            if (plan->pids[index] != getpid()) kill(plan->pids[index], SIGKILL);
        kill(getpid(), SIGKILL);
    }
    kill(target == LAUNCHER ? plan->launcher : pid ? pid : getpid(), SIGKILL);
    return 1;
}

static int lies_in(const char *path, const char *folder) {
    size_t length = strlen(folder);
    return length && !strncmp(path, folder, length);
}

/* Return the errno with which this call must fail, or 0. `torn` becomes 1 where half of a write must happen first. */
static int fault(int call, const char *path, int *torn) {
    if (!lies_in(path, plan->root)) return 0;
    int rank = own_rank();
    if (plan->records) {
        char line[1400];
        int length = snprintf(line, sizeof line, "%d %d %d %s\n", depth, rank, call, path + strlen(plan->root));
        if (length < (int)sizeof line) syscall(SYS_write, log_file, line, length);
        return 0;
    }
    if (__atomic_load_n(&plan->fired, __ATOMIC_SEQ_CST))
        return call & plan->lasting && lies_in(path, plan->disk) ? plan->error : 0;
    if (!(call & plan->calls) || depth != plan->depth || rank != plan->rank || !lies_in(path, plan->place)) return 0;
    if (__atomic_add_fetch(&plan->count, 1, __ATOMIC_SEQ_CST) != plan->nth) return 0;
    if (plan->error) {
        __atomic_store_n(&plan->fired, 1, __ATOMIC_SEQ_CST);
        return plan->error;
    }
    if (torn && plan->target != LAUNCHER) {
        *torn = 1;
        return 0;
    }
    chaos_kill(plan->target, 0);
    return 0;
}

static int fault_at(int call, int folder, const char *path, int *torn) {
    if (!plan || inside || !path) return 0;
    inside = 1;
    int kept = errno, error;
    if (path[0] == '/') {
        error = fault(call, path, torn);
    } else {
        char link[40], whole[1300];
        ssize_t length;
        if (folder == AT_FDCWD)
            strcpy(link, "/proc/self/cwd");
        else
            snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
        length = syscall(SYS_readlinkat, AT_FDCWD, link, whole, 700);
        if (length < 0) length = 0;
        snprintf(whole + length, sizeof whole - length, path[0] ? "/%s" : "%s", path);
        error = fault(call, whole, torn);
    }
    inside = 0;
    errno = error ? error : kept;
    return error;
}

static int fault_of(int call, int file, int *torn) {
    return fault_at(call, file, "", torn);
}

#define REAL(name) ((__typeof__(name) *)real(&real_##name, #name))
#define DECLARE(name) static void *real_##name
static void *real(void **place, const char *name) {
    if (!*place) *place = dlsym(RTLD_NEXT, name);
    return *place;
}

static int call_of(int flags) { return flags & (O_WRONLY | O_RDWR | O_CREAT) ? OPENS : READS; }

#define OPEN(name)                                                  \
    DECLARE(name);                                                  \
    int name(const char *path, int flags, ...) {                    \
        va_list rest;                                               \
        va_start(rest, flags);                                      \
        mode_t mode = va_arg(rest, mode_t);                         \
        va_end(rest);                                               \
        if (fault_at(call_of(flags), AT_FDCWD, path, NULL)) return -1; \
        return REAL(name)(path, flags, mode);                       \
    }
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                                \
    DECLARE(name);                                                  \
    int name(int folder, const char *path, int flags, ...) {        \
        va_list rest;                                               \
        va_start(rest, flags);                                      \
        mode_t mode = va_arg(rest, mode_t);                         \
        va_end(rest);                                               \
        if (fault_at(call_of(flags), folder, path, NULL)) return -1; \
        return REAL(name)(folder, path, flags, mode);               \
    }
OPENAT(openat)
OPENAT(openat64)

#define FOPEN(name)                                                                                   \
    DECLARE(name);                                                                                    \
    FILE *name(const char *path, const char *mode) {                                                  \
        if (fault_at(mode[0] == 'r' && !strchr(mode, '+') ? READS : OPENS, AT_FDCWD, path, NULL)) return NULL; \
        return REAL(name)(path, mode);                                                                \
    }
FOPEN(fopen)
FOPEN(fopen64)

/* A kill during a write leaves half of it. */
DECLARE(write);
ssize_t write(int file, const void *bytes, size_t size) {
    int torn = 0;
    if (fault_of(WRITES, file, &torn)) return -1;
    if (torn) {
        REAL(write)(file, bytes, size / 2);
        chaos_kill(plan->target, 0);
    }
    return REAL(write)(file, bytes, size);
}

DECLARE(writev);
ssize_t writev(int file, const struct iovec *parts, int number) {
    int torn = 0;
    if (fault_of(WRITES, file, &torn)) return -1;
    if (torn) chaos_kill(plan->target, 0);
    return REAL(writev)(file, parts, number);
}

#define PWRITE(name)                                                            \
    DECLARE(name);                                                              \
    ssize_t name(int file, const void *bytes, size_t size, off_t place) {       \
        int torn = 0;                                                           \
        if (fault_of(WRITES, file, &torn)) return -1;                           \
        if (torn) chaos_kill(plan->target, 0);                                  \
        return REAL(name)(file, bytes, size, place);                            \
    }
PWRITE(pwrite)
PWRITE(pwrite64)

DECLARE(read);
ssize_t read(int file, void *bytes, size_t size) {
    if (fault_of(READS, file, NULL)) return -1;
    return REAL(read)(file, bytes, size);
}

DECLARE(sendfile);
ssize_t sendfile(int to, int from, off_t *place, size_t size) {
    if (fault_of(WRITES, to, NULL)) return -1;
    return REAL(sendfile)(to, from, place, size);
}
DECLARE(sendfile64);
ssize_t sendfile64(int to, int from, off64_t *place, size_t size) {
    if (fault_of(WRITES, to, NULL)) return -1;
    return REAL(sendfile64)(to, from, place, size);
}

#define OF_FILE(name, call)                          \
    DECLARE(name);                                   \
    int name(int file) {                             \
        if (fault_of(call, file, NULL)) return -1;   \
        return REAL(name)(file);                     \
    }
OF_FILE(fsync, SYNCS)
OF_FILE(fdatasync, SYNCS)

#define OF_PATH(name, call)                                      \
    DECLARE(name);                                               \
    int name(const char *path) {                                 \
        if (fault_at(call, AT_FDCWD, path, NULL)) return -1;     \
        return REAL(name)(path);                                 \
    }
OF_PATH(unlink, REMOVES)
OF_PATH(rmdir, REMOVES)

DECLARE(unlinkat);
int unlinkat(int folder, const char *path, int flags) {
    if (fault_at(REMOVES, folder, path, NULL)) return -1;
    return REAL(unlinkat)(folder, path, flags);
}

DECLARE(mkdir);
int mkdir(const char *path, mode_t mode) {
    if (fault_at(MAKES, AT_FDCWD, path, NULL)) return -1;
    return REAL(mkdir)(path, mode);
}

DECLARE(rename);
int rename(const char *old, const char *new) {
    if (fault_at(RENAMES, AT_FDCWD, new, NULL)) return -1;
    return REAL(rename)(old, new);
}

DECLARE(renameat);
int renameat(int folder, const char *old, int other, const char *new) {
    if (fault_at(RENAMES, other, new, NULL)) return -1;
    return REAL(renameat)(folder, old, other, new);
}
