/* Fails the N-th file operation below a directory; loaded with LD_PRELOAD.

   It stands before the C library's functions, through which Python, PyTorch and safetensors do all
   of their file operations: a patch of Python's os and open would miss the last two. Buffered
   streams (fopen) call the system from inside the library; their own functions are wrapped instead.
   Not wrapped are lseek, dup, ioctl, fcntl and close of a directory stream, which never reach the
   disk, and access to mapped memory, which fails by a signal.

   A process arms itself with faults_arm; a fork inherits that. */

#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>
#include <sys/uio.h>
#include <sys/xattr.h>
#include <unistd.h>

enum kind { NONE, FAIL_EIO, FAIL_ENOSPC, FAIL_EINTR, CUT, KILL, FAIL_EIO_OF_CHANGES, WATCH, STARVE };
/* what an operation does: it changes the disk, takes space on it, waits for it, moves bytes */
enum trait { CHANGES = 1, TAKES_SPACE = 2, WAITS = 4, MOVES = 8 };

#define MOST_FILES 65536
#define MOST_COUNTED 65536

static char root[4096];
static int kind, unsupported;
static long at, count;
/* reads and writes of all files */
static long moved[2];
static const char *fired;
/* called before each change of the disk and each sync */
static void (*watcher)(const char *name, int file);
/* bytes of the smallest allocation that fails */
static size_t large;
/* the descriptor that was looked up last */
static int last_file;
static char is_ours[MOST_FILES];
/* a number for each time that a file was opened, and that of the file whose bytes move now */
static long opened[MOST_FILES], openings, moving;
/* whether a counted operation moves bytes of the same file, by the same call, as the one before */
static char continues[MOST_COUNTED];

static int has_root(const char *path) {
  size_t length = strlen(root);
  return length && path && !strncmp(path, root, length) && (path[length] == '/' || !path[length]);
}

static int is_below(int folder, const char *path) {
  if (!path) return 0;
  if (path[0] == '/') return has_root(path);
  return folder >= 0 && folder < MOST_FILES && is_ours[folder];
}

static int is_file(int file) {
  last_file = file;
  return file >= 0 && file < MOST_FILES && is_ours[file];
}

static void note(int file, int ours) {
  if (file < 0 || file >= MOST_FILES) return;
  is_ours[file] = ours;
  opened[file] = ++openings;
}

/* Counts an operation; 1: it has to fail, with errno set; 2: it moves a part of its bytes only. */
static int strikes(const char *name, int traits, size_t bytes) {
  static const char *name_before;
  static long file_before;
  long file = moving;
  moving = 0;
  if (kind == WATCH && traits & (CHANGES | TAKES_SPACE)) {
    /* the watcher's own operations are not watched */
    kind = NONE;
    watcher(name, last_file);
    kind = WATCH;
  }
  int hit = kind == FAIL_EIO || (kind == FAIL_EIO_OF_CHANGES && traits & (CHANGES | TAKES_SPACE)) ||
            (kind == FAIL_ENOSPC && traits & TAKES_SPACE) ||
            (kind == FAIL_EINTR && traits & WAITS) || (kind == CUT && traits & MOVES && bytes > 1) ||
            (kind == KILL && traits & CHANGES);
  if (!hit) return 0;
  if (count < MOST_COUNTED)
    continues[count] = count && file && file == file_before && name == name_before;
  file_before = file, name_before = name;
  count++;
  /* a full disk stays full */
  if (kind == FAIL_ENOSPC ? count < at : count != at) return 0;
  fired = name;
  if (kind == KILL) kill(getpid(), SIGKILL);
  if (kind == CUT) return 2;
  errno = kind == FAIL_ENOSPC ? ENOSPC : kind == FAIL_EINTR ? EINTR : EIO;
  return 1;
}

/* ------------------------------------------------------------ the test's side */

void faults_arm(const char *folder, int new_kind, long new_at) {
  strncpy(root, folder, sizeof root - 1);
  kind = new_kind, at = new_at, count = 0, fired = NULL;
}

void faults_disarm(void) { kind = NONE; }

void faults_watch(const char *folder, void (*new_watcher)(const char *, int)) {
  watcher = new_watcher;
  faults_arm(folder, WATCH, 0);
}

void faults_large(size_t bytes) { large = bytes; }
void faults_without_renameat2(int code) { unsupported = code; }
long faults_moved(int writes) { return moved[writes]; }
const char *faults_fired(void) { return fired; }
long faults_count(void) { return count; }
int faults_continues(long number) { return number <= MOST_COUNTED && continues[number - 1]; }

/* ---------------------------------------------------------------- the wrappers */

#define REAL(name)                        \
  static __typeof__(name) *real;          \
  if (!real) real = dlsym(RTLD_NEXT, #name)

#define ON_PATH(type, name, declared, given, path_ours, traits, failed) \
  type name declared {                                                 \
    REAL(name);                                                        \
    if ((path_ours) && strikes(#name, traits, 0)) return failed;       \
    return real given;                                                 \
  }

#define OPEN(name, declared, folder, given)                            \
  int name declared {                                                  \
    REAL(name);                                                        \
    mode_t mode = 0;                                                   \
    if (flags & (O_CREAT | O_TMPFILE)) {                               \
      va_list rest;                                                    \
      va_start(rest, flags);                                           \
      mode = va_arg(rest, mode_t);                                     \
      va_end(rest);                                                    \
    }                                                                  \
    int ours = is_below(folder, path);                                 \
    int traits = WAITS | (flags & O_CREAT ? CHANGES | TAKES_SPACE : 0); \
    if (ours && strikes(#name, traits, 0)) return -1;                  \
    int file = real given;                                             \
    note(file, ours);                                                  \
    return file;                                                       \
  }

OPEN(open, (const char *path, int flags, ...), AT_FDCWD, (path, flags, mode))
OPEN(open64, (const char *path, int flags, ...), AT_FDCWD, (path, flags, mode))
OPEN(openat, (int folder, const char *path, int flags, ...), folder, (folder, path, flags, mode))
OPEN(openat64, (int folder, const char *path, int flags, ...), folder, (folder, path, flags, mode))

/* the file is closed even so, as on Linux */
int close(int file) {
  REAL(close);
  int ours = is_file(file);
  note(file, 0);
  int struck = ours && strikes("close", WAITS, 0);
  int code = errno, result = real(file);
  if (!struck) return result;
  errno = code;
  return -1;
}

#define MOVE(name, declared, traits, whole, part)           \
  ssize_t name declared {                                   \
    REAL(name);                                             \
    int does = traits;                                      \
    moved[(does & CHANGES) != 0]++;                         \
    if (is_file(file)) moving = opened[file];               \
    int struck = is_file(file) ? strikes(#name, does, n) : 0; \
    if (struck == 1) return -1;                             \
    return struck ? real part : real whole;                 \
  }

MOVE(read, (int file, void *data, size_t n), WAITS | MOVES, (file, data, n), (file, data, n / 2))
MOVE(pread, (int file, void *data, size_t n, off_t o), WAITS | MOVES, (file, data, n, o),
     (file, data, n / 2, o))
MOVE(pread64, (int file, void *data, size_t n, off64_t o), WAITS | MOVES, (file, data, n, o),
     (file, data, n / 2, o))
#define WRITES (CHANGES | TAKES_SPACE | WAITS | MOVES)
MOVE(write, (int file, const void *data, size_t n), WRITES, (file, data, n), (file, data, n / 2))
MOVE(pwrite, (int file, const void *data, size_t n, off_t o), WRITES, (file, data, n, o),
     (file, data, n / 2, o))
MOVE(pwrite64, (int file, const void *data, size_t n, off64_t o), WRITES, (file, data, n, o),
     (file, data, n / 2, o))
/* the system counts each of these as a read, too */
#define BOTH (moved[0]++, WRITES)
MOVE(sendfile, (int file, int from, off_t *o, size_t n), BOTH, (file, from, o, n),
     (file, from, o, n / 2))
MOVE(sendfile64, (int file, int from, off64_t *o, size_t n), BOTH, (file, from, o, n),
     (file, from, o, n / 2))
MOVE(copy_file_range, (int from, off64_t *a, int file, off64_t *b, size_t n, unsigned flags),
     BOTH, (from, a, file, b, n, flags), (from, a, file, b, n / 2, flags))

ssize_t writev(int file, const struct iovec *parts, int n) {
  REAL(writev);
  moved[1]++;
  int struck = is_file(file) ? strikes("writev", WRITES, parts[0].iov_len) : 0;
  if (struck == 1) return -1;
  return struck ? write(file, parts[0].iov_base, parts[0].iov_len / 2) : real(file, parts, n);
}

#define ON_FILE(name, declared, given, traits) \
  ON_PATH(int, name, declared, given, is_file(file), traits, -1)

ON_FILE(fsync, (int file), (file), TAKES_SPACE | WAITS)
ON_FILE(fdatasync, (int file), (file), TAKES_SPACE | WAITS)
ON_FILE(ftruncate, (int file, off_t n), (file, n), CHANGES | TAKES_SPACE | WAITS)
ON_FILE(ftruncate64, (int file, off64_t n), (file, n), CHANGES | TAKES_SPACE | WAITS)
ON_FILE(fallocate, (int file, int mode, off_t a, off_t n), (file, mode, a, n),
        CHANGES | TAKES_SPACE | WAITS)
ON_FILE(fallocate64, (int file, int mode, off64_t a, off64_t n), (file, mode, a, n),
        CHANGES | TAKES_SPACE | WAITS)
ON_FILE(flock, (int file, int what), (file, what), WAITS)
ON_FILE(fstat, (int file, struct stat *out), (file, out), 0)
ON_FILE(fstat64, (int file, struct stat64 *out), (file, out), 0)
ON_FILE(fstatfs, (int file, struct statfs *out), (file, out), 0)
ON_FILE(fchmod, (int file, mode_t mode), (file, mode), CHANGES)
ON_FILE(futimens, (int file, const struct timespec t[2]), (file, t), CHANGES)
ON_PATH(void *, mmap, (void *a, size_t n, int p, int f, int file, off_t o), (a, n, p, f, file, o),
        is_file(file), 0, MAP_FAILED)
ON_PATH(void *, mmap64, (void *a, size_t n, int p, int f, int file, off64_t o),
        (a, n, p, f, file, o), is_file(file), 0, MAP_FAILED)

#define AT(name, declared, given, traits) \
  ON_PATH(int, name, declared, given, is_below(folder, path), traits, -1)
#define PLAIN(name, declared, given, traits) \
  ON_PATH(int, name, declared, given, has_root(path), traits, -1)
#define GROWS (CHANGES | TAKES_SPACE)

AT(mkdirat, (int folder, const char *path, mode_t mode), (folder, path, mode), GROWS)
PLAIN(mkdir, (const char *path, mode_t mode), (path, mode), GROWS)
AT(unlinkat, (int folder, const char *path, int flags), (folder, path, flags), CHANGES)
PLAIN(unlink, (const char *path), (path), CHANGES)
PLAIN(rmdir, (const char *path), (path), CHANGES)
PLAIN(rename, (const char *path, const char *new), (path, new), GROWS)
AT(renameat, (int folder, const char *path, int to, const char *new), (folder, path, to, new),
   GROWS)
PLAIN(link, (const char *path, const char *new), (path, new), GROWS)
AT(fchmodat, (int folder, const char *path, mode_t mode, int f), (folder, path, mode, f), CHANGES)
PLAIN(chmod, (const char *path, mode_t mode), (path, mode), CHANGES)
AT(utimensat, (int folder, const char *path, const struct timespec t[2], int f),
   (folder, path, t, f), CHANGES)
PLAIN(truncate, (const char *path, off_t n), (path, n), GROWS | WAITS)
AT(fstatat, (int folder, const char *path, struct stat *out, int f), (folder, path, out, f), 0)
AT(fstatat64, (int folder, const char *path, struct stat64 *out, int f), (folder, path, out, f), 0)
AT(statx, (int folder, const char *path, int f, unsigned m, struct statx *out),
   (folder, path, f, m, out), 0)
PLAIN(stat, (const char *path, struct stat *out), (path, out), 0)
PLAIN(stat64, (const char *path, struct stat64 *out), (path, out), 0)
PLAIN(lstat, (const char *path, struct stat *out), (path, out), 0)
PLAIN(lstat64, (const char *path, struct stat64 *out), (path, out), 0)
PLAIN(statfs, (const char *path, struct statfs *out), (path, out), 0)
PLAIN(statvfs, (const char *path, struct statvfs *out), (path, out), 0)
PLAIN(statvfs64, (const char *path, struct statvfs64 *out), (path, out), 0)
PLAIN(access, (const char *path, int mode), (path, mode), 0)
AT(faccessat, (int folder, const char *path, int mode, int f), (folder, path, mode, f), 0)
ON_PATH(ssize_t, readlink, (const char *path, char *out, size_t n), (path, out, n), has_root(path),
        0, -1)
ON_PATH(ssize_t, readlinkat, (int folder, const char *path, char *out, size_t n),
        (folder, path, out, n), is_below(folder, path), 0, -1)
ON_PATH(ssize_t, listxattr, (const char *path, char *out, size_t n), (path, out, n),
        has_root(path), 0, -1)

int renameat2(int folder, const char *path, int to, const char *new, unsigned flags) {
  REAL(renameat2);
  if (!is_below(folder, path)) return real(folder, path, to, new, flags);
  if (unsupported) {
    errno = unsupported;
    return -1;
  }
  if (strikes("renameat2", GROWS, 0)) return -1;
  return real(folder, path, to, new, flags);
}

/* directories */

DIR *opendir(const char *path) {
  REAL(opendir);
  int ours = has_root(path);
  if (ours && strikes("opendir", WAITS, 0)) return NULL;
  DIR *found = real(path);
  if (found) note(dirfd(found), ours);
  return found;
}

int closedir(DIR *folder) {
  REAL(closedir);
  note(dirfd(folder), 0);
  return real(folder);
}

ON_PATH(struct dirent *, readdir, (DIR *folder), (folder), is_file(dirfd(folder)), 0, NULL)
ON_PATH(struct dirent64 *, readdir64, (DIR *folder), (folder), is_file(dirfd(folder)), 0, NULL)

/* buffered streams; one is marked as ours by its descriptor */

#define FOPEN(name)                                                                      \
  FILE *name(const char *path, const char *mode) {                                       \
    REAL(name);                                                                          \
    int ours = has_root(path), traits = WAITS | (mode[0] == 'r' ? 0 : GROWS);            \
    if (ours && strikes(#name, traits, 0)) return NULL;                                  \
    FILE *stream = real(path, mode);                                                     \
    if (stream) note(fileno(stream), ours);                                              \
    return stream;                                                                       \
  }

FOPEN(fopen)
FOPEN(fopen64)
ON_PATH(size_t, fread, (void *data, size_t size, size_t n, FILE *stream), (data, size, n, stream),
        is_file(fileno(stream)), WAITS, 0)
ON_PATH(size_t, fwrite, (const void *data, size_t size, size_t n, FILE *stream),
        (data, size, n, stream), is_file(fileno(stream)), WRITES & ~MOVES, 0)
ON_PATH(int, fflush, (FILE *stream), (stream), stream && is_file(fileno(stream)),
        WRITES & ~MOVES, EOF)

int fclose(FILE *stream) {
  REAL(fclose);
  int ours = is_file(fileno(stream));
  note(fileno(stream), 0);
  int struck = ours && strikes("fclose", WAITS, 0);
  int code = errno, result = real(stream);
  if (!struck) return result;
  errno = code;
  return EOF;
}

/* memory, of the main thread alone: a thread that the C library starts cannot report an error */

static int starves(size_t bytes) {
  if (kind != STARVE || bytes < large || gettid() != getpid()) return 0;
  if (++count != at) return 0;
  fired = "an allocation";
  errno = ENOMEM;
  return 1;
}

void *__libc_malloc(size_t);
void *__libc_calloc(size_t, size_t);
void *__libc_realloc(void *, size_t);
void *__libc_memalign(size_t, size_t);

void *malloc(size_t n) { return starves(n) ? NULL : __libc_malloc(n); }
void *calloc(size_t n, size_t size) { return starves(n * size) ? NULL : __libc_calloc(n, size); }
void *realloc(void *old, size_t n) { return starves(n) ? NULL : __libc_realloc(old, n); }

int posix_memalign(void **out, size_t alignment, size_t n) {
  if (starves(n)) return ENOMEM;
  *out = __libc_memalign(alignment, n);
  return *out ? 0 : ENOMEM;
}

#define MOVE_PARTS(name, declared, whole, part)                              \
  ssize_t name declared {                                                    \
    REAL(name);                                                              \
    moved[0]++;                                                              \
    if (is_file(file)) moving = opened[file];                                \
    size_t bytes = n ? all[0].iov_len : 0;                                   \
    int struck = is_file(file) ? strikes(#name, WAITS | MOVES, bytes) : 0;   \
    if (struck == 1) return -1;                                              \
    struct iovec half = {n ? all[0].iov_base : NULL, bytes / 2};             \
    return struck ? real part : real whole;                                  \
  }

MOVE_PARTS(preadv64, (int file, const struct iovec *all, int n, off64_t o), (file, all, n, o),
           (file, &half, 1, o))
MOVE_PARTS(preadv64v2, (int file, const struct iovec *all, int n, off64_t o, int flags),
           (file, all, n, o, flags), (file, &half, 1, o, flags))
