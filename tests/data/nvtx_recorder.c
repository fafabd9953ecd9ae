/* A tool in the sense of NVTX: writes down each push and pop that a process makes, as nsys would receive them.
 *
 * NVTX loads the library that NVTX_INJECTION64_PATH names, calls InitializeInjectionNvtx2, and from then on whatever this puts
 * into the tables of callbacks. Lines go to the file that NVTX_RECORDER_FILE names, fields apart by tabs:
 *
 *     push  thread  domain  message  registered|plain  payload
 *     pop   thread  domain
 *
 * The declarations are the part of NVTX's binary interface, version 3, that is used here; no header is needed.
 */
#define _GNU_SOURCE
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { CALLBACKS = 1 };                   /* the export table with the callbacks */
enum { CORE = 1, CORE2 = 5 };             /* modules: calls without a domain, and with one */
enum { PUSH_EX = 8, PUSH_A = 9, POP = 11 };
enum { DOMAIN_PUSH_EX = 4, DOMAIN_POP = 5, REGISTER_A = 10, DOMAIN_CREATE_A = 12 };
enum { ASCII = 1, REGISTERED = 3 };       /* kinds of messages */
enum { NO_PAYLOAD = 0 };

typedef void (*Function)(void);

typedef struct {
    size_t struct_size;
    int (*module_functions)(int module, Function ***table, unsigned int *size);
} Callbacks;

typedef struct {
    uint16_t version, size;
    uint32_t category;
    int32_t color_kind;
    uint32_t color;
    int32_t payload_kind, reserved;
    union {
        int64_t integer;
        double real;
    } payload;
    int32_t message_kind;
    union {
        const char *text;
        void *handle;
    } message;
} Attributes;

static FILE *file;

/* A handle is the name itself. */
static void *keep(const char *name) { return strdup(name); }
static void *create_domain(const char *name) { return keep(name); }
static void *register_string(void *domain, const char *text) {
    (void)domain;
    return keep(text);
}

static int domain_push(void *domain, const Attributes *of) {
    int is_registered = of->message_kind == REGISTERED;
    const char *text = is_registered ? of->message.handle : of->message_kind == ASCII ? of->message.text : "?";
    char payload[32] = "";
    if (of->payload_kind != NO_PAYLOAD)
        snprintf(payload, sizeof payload, "%lld", (long long)of->payload.integer);
    fprintf(file, "push\t%ld\t%s\t%s\t%s\t%s\n", syscall(SYS_gettid), domain ? (const char *)domain : "", text,
            is_registered ? "registered" : "plain", payload);
    return 0;
}

static int domain_pop(void *domain) {
    fprintf(file, "pop\t%ld\t%s\n", syscall(SYS_gettid), domain ? (const char *)domain : "");
    return 0;
}

static int push(const Attributes *of) { return domain_push(NULL, of); }
static int push_text(const char *text) {
    fprintf(file, "push\t%ld\t\t%s\tplain\t\n", syscall(SYS_gettid), text);
    return 0;
}
static int pop(void) { return domain_pop(NULL); }

int InitializeInjectionNvtx2(const void *(*export_table)(uint32_t)) {
    const Callbacks *callbacks = export_table(CALLBACKS);
    const char *path = getenv("NVTX_RECORDER_FILE");
    Function **core, **core2;
    unsigned int core_size, core2_size;
    if (callbacks == NULL || path == NULL || (file == NULL && (file = fopen(path, "a")) == NULL))
        return 0;
    setvbuf(file, NULL, _IOLBF, 0); /* whole lines, whatever way the process ends */
    if (!callbacks->module_functions(CORE, &core, &core_size) || core_size <= POP ||
        !callbacks->module_functions(CORE2, &core2, &core2_size) || core2_size <= DOMAIN_CREATE_A)
        return 0;
    *core[PUSH_EX] = (Function)push;
    *core[PUSH_A] = (Function)push_text;
    *core[POP] = (Function)pop;
    *core2[DOMAIN_PUSH_EX] = (Function)domain_push;
    *core2[DOMAIN_POP] = (Function)domain_pop;
    *core2[REGISTER_A] = (Function)register_string;
    *core2[DOMAIN_CREATE_A] = (Function)create_domain;
    return 1;
}
