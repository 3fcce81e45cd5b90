/* Stands between a process and the C library (LD_PRELOAD): counts what changes files below one folder, logs it with its
 * data, and at a chosen operation lets it fail, fall short, or ends the process there.
 *
 * The log is what a power cut is made of (storage.py): which bytes were written where, and what was synced since. A way of
 * writing that is not known here ends the process, so that nothing goes by unseen. Nothing here is thread-safe: the jobs that
 * are watched write from one thread.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum operation { WRITE = 1, TRUNCATE, SYNC, CREATE, MAKE_FOLDER, RENAME, REMOVE, MARK };
enum fault { NONE, DIE_BEFORE, DIE_AFTER, DIE_AMID, FAIL, FAIL_FROM_NOW_ON, SHORT, SHORT_THEN_FAIL };

/* As Python's struct reads it: "<BBHHIq". Paths and data follow. */
struct __attribute__((packed)) record {
    uint8_t operation, succeeded;
    uint16_t path_length, other_length;
    uint32_t data_length;
    int64_t offset;
};

static char root[PATH_MAX];
static size_t root_length;
static int log_file = -1;
static long operations, chosen = -1;
static enum fault fault;
static int fault_error;

#define REAL(name) \
    static __typeof__(&name) real; \
    if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

static ssize_t write_really(int file, const void *data, size_t size) {
    REAL(write);
    return real(file, data, size);
}

static int open_really(const char *path, int flags, mode_t mode) {
    REAL(open64);
    return real(path, flags, mode);
}

/* From now on everything below the folder counts; at the chosen operation (from 0; none where negative) the fault happens. */
void faults_arm(const char *folder, const char *log_path, long at, int which, int error) {
    if (!realpath(folder, root)) abort();
    root_length = strlen(root);
    log_file = open_really(log_path, O_WRONLY | O_CREAT | O_TRUNC | O_APPEND | O_CLOEXEC, 0600);
    if (log_file < 0) abort();
    operations = 0;
    chosen = at;
    fault = (enum fault)which;
    fault_error = error;
}

void faults_disarm(void) {
    if (log_file >= 0) close(log_file);
    log_file = -1;
}

/* The path below the folder that is watched; NULL for every other one. */
static const char *below(const char *path) {
    if (log_file < 0 || strncmp(path, root, root_length) != 0) return NULL;
    if (path[root_length] == '\0') return "";
    return path[root_length] == '/' ? path + root_length + 1 : NULL;
}

static const char *named(const char *path, char *room) {
    if (log_file < 0) return NULL;
    if (path[0] != '/') {
        if (!getcwd(room, PATH_MAX)) abort();
        strncat(room, "/", PATH_MAX - strlen(room) - 1);
        strncat(room, path, PATH_MAX - strlen(room) - 1);
    } else {
        strncpy(room, path, PATH_MAX - 1);
        room[PATH_MAX - 1] = '\0';
    }
    return below(room);
}

static const char *opened(int file, char *room) {
    if (log_file < 0 || file == log_file) return NULL;
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, room, PATH_MAX - 1);
    if (length < 0) return NULL;
    room[length] = '\0';
    const char *gone = " (deleted)";
    if (length > 10 && strcmp(room + length - 10, gone) == 0) return NULL;
    return below(room);
}

static void note(enum operation operation, int succeeded, const char *path, const char *other, const void *data, size_t size,
                 int64_t offset) {
    struct record record = {(uint8_t)operation, (uint8_t)succeeded, (uint16_t)strlen(path),
                            (uint16_t)(other ? strlen(other) : 0), (uint32_t)size, offset};
    /* In one piece, as the process may end at any moment. */
    struct iovec parts[] = {{&record, sizeof record}, {(void *)path, record.path_length},
                            {(void *)other, record.other_length}, {(void *)data, size}};
    REAL(writev);
    if (real(log_file, parts, 4) < 0) abort();
}

void faults_mark(const char *text) {
    if (log_file >= 0) note(MARK, 1, text, NULL, NULL, 0, 0);
}

static void die(void) {
    kill(getpid(), SIGKILL);
    for (;;) pause();
}

/* What is to happen at the next operation. */
static enum fault next(void) {
    long now = operations++;
    if (now == chosen) {
        if (fault == DIE_BEFORE) die();
        return fault;
    }
    int goes_on = fault == FAIL_FROM_NOW_ON || fault == SHORT_THEN_FAIL;
    return chosen >= 0 && now > chosen && goes_on ? FAIL : NONE;
}

static int fails(enum fault now) { return now == FAIL || now == FAIL_FROM_NOW_ON; }

static void die_if_after(enum fault now) {
    if (now == DIE_AFTER || now == DIE_AMID) die();
}

/* Every operation but writes: it happens or fails, and is noted. */
#define CARRY_OUT(operation, path, other, offset, call) \
    do { \
        enum fault now = next(); \
        int result = -1; \
        if (fails(now)) \
            errno = fault_error; \
        else \
            result = (call); \
        int kept = errno; \
        note(operation, result >= 0, path, other, NULL, 0, offset); \
        die_if_after(now); \
        errno = kept; \
        return result; \
    } while (0)

static ssize_t write_watched(int file, const char *path, const void *data, size_t size, int64_t offset) {
    REAL(pwrite64);
    enum fault now = next();
    if (fails(now)) {
        errno = fault_error;
        return -1;
    }
    if (size > 1 && (now == DIE_AMID || now == SHORT || now == SHORT_THEN_FAIL)) size = size / 2;
    int64_t where = offset;
    ssize_t written;
    if (offset >= 0) {
        written = real(file, data, size, offset);
    } else {
        where = lseek(file, 0, SEEK_CUR);
        if (fcntl(file, F_GETFL) & O_APPEND) where = lseek(file, 0, SEEK_END);
        written = write_really(file, data, size);
    }
    int kept = errno;
    if (written > 0) note(WRITE, 1, path, NULL, data, (size_t)written, where);
    die_if_after(now);
    errno = kept;
    return written;
}

ssize_t write(int file, const void *data, size_t size) {
    char room[PATH_MAX];
    const char *path = opened(file, room);
    return path ? write_watched(file, path, data, size, -1) : write_really(file, data, size);
}

ssize_t pwrite64(int file, const void *data, size_t size, off64_t offset) {
    REAL(pwrite64);
    char room[PATH_MAX];
    const char *path = opened(file, room);
    return path ? write_watched(file, path, data, size, offset) : real(file, data, size, offset);
}

ssize_t pwrite(int file, const void *data, size_t size, off_t offset) { return pwrite64(file, data, size, offset); }

#define SYNCS(name) \
    int name(int file) { \
        REAL(name); \
        char room[PATH_MAX]; \
        const char *path = opened(file, room); \
        if (!path) return real(file); \
        CARRY_OUT(SYNC, path, NULL, 0, real(file)); \
    }
SYNCS(fsync)
SYNCS(fdatasync)

int ftruncate64(int file, off64_t size) {
    REAL(ftruncate64);
    char room[PATH_MAX];
    const char *path = opened(file, room);
    if (!path) return real(file, size);
    CARRY_OUT(TRUNCATE, path, NULL, size, real(file, size));
}

int ftruncate(int file, off_t size) { return ftruncate64(file, size); }

int unlink(const char *name) {
    REAL(unlink);
    char room[PATH_MAX];
    const char *path = named(name, room);
    struct stat64 there;
    if (!path || lstat64(name, &there) != 0) return real(name);
    CARRY_OUT(REMOVE, path, NULL, 0, real(name));
}

int rename(const char *from, const char *to) {
    REAL(rename);
    char room[PATH_MAX], other_room[PATH_MAX];
    const char *path = named(from, room), *other = named(to, other_room);
    if (!path && !other) return real(from, to);
    if (!path || !other) abort();
    CARRY_OUT(RENAME, path, other, 0, real(from, to));
}

int mkdir(const char *name, mode_t mode) {
    REAL(mkdir);
    char room[PATH_MAX];
    const char *path = named(name, room);
    struct stat64 there;
    if (!path || lstat64(name, &there) == 0) return real(name, mode);
    CARRY_OUT(MAKE_FOLDER, path, NULL, 0, real(name, mode));
}

static int open_watched(const char *path, const char *name, int flags, mode_t mode) {
    struct stat64 there;
    int exists = stat64(name, &there) == 0;
    if (!exists && flags & O_CREAT) CARRY_OUT(CREATE, path, NULL, 0, open_really(name, flags, mode));
    if (exists && flags & O_TRUNC && (flags & O_ACCMODE) != O_RDONLY)
        CARRY_OUT(TRUNCATE, path, NULL, 0, open_really(name, flags, mode));
    return open_really(name, flags, mode);
}

#define OPENS(name) \
    int name(const char *file, int flags, ...) { \
        va_list more; \
        va_start(more, flags); \
        mode_t mode = flags & (O_CREAT | __O_TMPFILE) ? va_arg(more, mode_t) : 0; \
        va_end(more); \
        char room[PATH_MAX]; \
        const char *path = named(file, room); \
        return path ? open_watched(path, file, flags, mode) : open_really(file, flags, mode); \
    }
OPENS(open)
OPENS(open64)

/* What is not known above must not reach the folder at all. */

static void refuse_open(int file) {
    char room[PATH_MAX];
    if (opened(file, room)) {
        fprintf(stderr, "faults.c: a way of writing that it does not know\n");
        abort();
    }
}

ssize_t writev(int file, const struct iovec *parts, int count) {
    REAL(writev);
    refuse_open(file);
    return real(file, parts, count);
}

ssize_t pwritev(int file, const struct iovec *parts, int count, off_t offset) {
    REAL(pwritev);
    refuse_open(file);
    return real(file, parts, count, offset);
}

ssize_t pwritev64(int file, const struct iovec *parts, int count, off64_t offset) {
    REAL(pwritev64);
    refuse_open(file);
    return real(file, parts, count, offset);
}

int fallocate64(int file, int mode, off64_t offset, off64_t length) {
    REAL(fallocate64);
    refuse_open(file);
    return real(file, mode, offset, length);
}

int posix_fallocate64(int file, off64_t offset, off64_t length) {
    REAL(posix_fallocate64);
    refuse_open(file);
    return real(file, offset, length);
}

ssize_t copy_file_range(int in, off64_t *from, int out, off64_t *to, size_t length, unsigned flags) {
    REAL(copy_file_range);
    refuse_open(out);
    return real(in, from, out, to, length, flags);
}

ssize_t pwritev64v2(int file, const struct iovec *parts, int count, off64_t offset, int flags) {
    REAL(pwritev64v2);
    refuse_open(file);
    return real(file, parts, count, offset, flags);
}

ssize_t sendfile64(int out, int in, off64_t *offset, size_t count) {
    REAL(sendfile64);
    refuse_open(out);
    return real(out, in, offset, count);
}

static void refuse_named(const char *name) {
    char room[PATH_MAX];
    if (named(name, room)) {
        fprintf(stderr, "faults.c: a way of changing %s that it does not know\n", name);
        abort();
    }
}

static void refuse_at(int folder, const char *name) {
    if (folder == AT_FDCWD || name[0] == '/')
        refuse_named(name);
    else
        refuse_open(folder);
}

#define REFUSES_AT(name, parameters, folder, file, ...) \
    int name parameters { \
        REAL(name); \
        refuse_at(folder, file); \
        return real(__VA_ARGS__); \
    }
REFUSES_AT(mkdirat, (int folder, const char *file, mode_t mode), folder, file, folder, file, mode)
REFUSES_AT(unlinkat, (int folder, const char *file, int flags), folder, file, folder, file, flags)
REFUSES_AT(linkat, (int a, const char *from, int b, const char *to, int flags), b, to, a, from, b, to, flags)
REFUSES_AT(renameat, (int a, const char *from, int b, const char *to), b, to, a, from, b, to)
REFUSES_AT(symlinkat, (const char *to, int folder, const char *file), folder, file, to, folder, file)
REFUSES_AT(link, (const char *from, const char *to), AT_FDCWD, to, from, to)
REFUSES_AT(symlink, (const char *to, const char *from), AT_FDCWD, from, to, from)
REFUSES_AT(truncate64, (const char *file, off64_t size), AT_FDCWD, file, file, size)

int openat64(int folder, const char *file, int flags, ...) {
    REAL(openat64);
    va_list more;
    va_start(more, flags);
    mode_t mode = flags & (O_CREAT | __O_TMPFILE) ? va_arg(more, mode_t) : 0;
    va_end(more);
    if ((flags & O_ACCMODE) != O_RDONLY) refuse_at(folder, file);
    return real(folder, file, flags, mode);
}

FILE *fopen64(const char *file, const char *mode) {
    REAL(fopen64);
    if (strpbrk(mode, "wa+")) refuse_named(file);
    return real(file, mode);
}

/* The index of SQLite's log is the one file that is mapped: it is made anew after every crash. */
void *mmap64(void *where, size_t length, int protection, int flags, int file, off64_t offset) {
    REAL(mmap64);
    char room[PATH_MAX];
    const char *path = file >= 0 && flags & MAP_SHARED && protection & PROT_WRITE ? opened(file, room) : NULL;
    size_t size = path ? strlen(path) : 0;
    if (path && (size < 4 || strcmp(path + size - 4, "-shm") != 0)) refuse_open(file);
    return real(where, length, protection, flags, file, offset);
}
