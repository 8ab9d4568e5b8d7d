// A libnvidia-ml.so.1 for tests: GPUs that a test describes through the functions fake_*. The others have the signatures
// of NVIDIA's nvml.h, and return its error codes.
#include <string.h>

#define MAX_GPUS 16
#define MAX_LINKS 36

typedef struct { // nvmlPciInfo_t
    char busIdLegacy[16];
    unsigned int domain, bus, device, pciDeviceId, pciSubSystemId;
    char busId[32];
} Pci;

typedef struct {
    int state, type, version; // state -1: the GPU has no such link
    char bus[32];             // of the other end; "": it is not reported
} Link;

typedef struct {
    char name[64], bus[32], uuid[64];
    int major, minor, generation, width, mig;
    unsigned long cpus;
    Link links[MAX_LINKS];
} Gpu;

static Gpu gpus[MAX_GPUS];
static int count, opened, level[MAX_GPUS][MAX_GPUS], p2p[MAX_GPUS][MAX_GPUS], failing_code;
static char failing[64];

void fake_reset(int number) {
    memset(gpus, 0, sizeof gpus);
    memset(p2p, 0, sizeof p2p);
    for (int i = 0; i < MAX_GPUS; i++)
        for (int k = 0; k < MAX_LINKS; k++) gpus[i].links[k].state = -1;
    count = number;
    failing_code = 0;
}
void fake_gpu(int k, const char *name, const char *bus, const char *uuid, int major, int minor) {
    Gpu *gpu = &gpus[k];
    strcpy(gpu->name, name), strcpy(gpu->bus, bus), strcpy(gpu->uuid, uuid);
    gpu->major = major, gpu->minor = minor;
}
void fake_slot(int k, int generation, int width) { gpus[k].generation = generation, gpus[k].width = width; }
void fake_mig(int k, int enabled) { gpus[k].mig = enabled; }
void fake_cpus(int k, unsigned long mask) { gpus[k].cpus = mask; }
void fake_link(int k, int link, int state, int type, int version, const char *bus) {
    Link *found = &gpus[k].links[link];
    found->state = state, found->type = type, found->version = version;
    strcpy(found->bus, bus);
}
void fake_pair(int i, int j, int common, int status) {
    level[i][j] = level[j][i] = common;
    p2p[i][j] = p2p[j][i] = status;
}
void fake_failure(const char *function, int code) { strcpy(failing, function), failing_code = code; }
int fake_opened(void) { return opened; }

#define CHECK(function)                                                                                                \
    if (failing_code && !strcmp(failing, #function)) return failing_code;                                              \
    if (opened < 1) return 1 /* NVML_ERROR_UNINITIALIZED */
#define REFUSE_IF(condition, code)                                                                                     \
    if (condition) return code
#define LINK_OF(gpu, link)                                                                                             \
    REFUSE_IF((link) >= MAX_LINKS || ((Gpu *)(gpu))->links[link].state < 0, 2 /* NVML_ERROR_INVALID_ARGUMENT */)

static int put(char *to, unsigned int length, const char *text) {
    REFUSE_IF(length < 64, 7 /* NVML_ERROR_INSUFFICIENT_SIZE */);
    strcpy(to, text);
    return 0;
}
static int place(Pci *to, const char *bus) {
    memset(to, 0xff, sizeof *to);
    strcpy(to->busIdLegacy, bus + 4); // a domain of 4 digits
    strcpy(to->busId, bus);
    return 0;
}
static int number(const void *gpu) { return (int)((const Gpu *)gpu - gpus); }

const char *nvmlErrorString(int code) { return code == 15 ? "GPU is lost" : "Unknown Error"; }
int nvmlInit_v2(void) {
    opened++;
    if (failing_code && !strcmp(failing, "nvmlInit_v2")) return opened--, failing_code;
    return 0;
}
int nvmlShutdown(void) {
    CHECK(nvmlShutdown);
    opened--;
    return 0;
}
int nvmlSystemGetDriverVersion(char *to, unsigned int length) {
    CHECK(nvmlSystemGetDriverVersion);
    return put(to, length, "550.54.14");
}
int nvmlDeviceGetCount_v2(unsigned int *to) {
    CHECK(nvmlDeviceGetCount_v2);
    *to = count;
    return 0;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned int k, void **to) {
    CHECK(nvmlDeviceGetHandleByIndex_v2);
    REFUSE_IF((int)k >= count, 2);
    *to = &gpus[k];
    return 0;
}
#define TEXT(function, field)                                                                                          \
    int function(void *gpu, char *to, unsigned int length) {                                                           \
        CHECK(function);                                                                                               \
        return put(to, length, ((Gpu *)gpu)->field);                                                                   \
    }
TEXT(nvmlDeviceGetName, name)
TEXT(nvmlDeviceGetUUID, uuid)
#define NUMBER(function, field)                                                                                        \
    int function(void *gpu, unsigned int *to) {                                                                        \
        CHECK(function);                                                                                               \
        *to = ((Gpu *)gpu)->field;                                                                                     \
        return 0;                                                                                                      \
    }
NUMBER(nvmlDeviceGetMaxPcieLinkGeneration, generation)
NUMBER(nvmlDeviceGetMaxPcieLinkWidth, width)
#define LINK_NUMBER(function, field)                                                                                   \
    int function(void *gpu, unsigned int link, unsigned int *to) {                                                     \
        CHECK(function);                                                                                               \
        LINK_OF(gpu, link);                                                                                            \
        *to = ((Gpu *)gpu)->links[link].field;                                                                         \
        return 0;                                                                                                      \
    }
LINK_NUMBER(nvmlDeviceGetNvLinkState, state)
LINK_NUMBER(nvmlDeviceGetNvLinkVersion, version)
LINK_NUMBER(nvmlDeviceGetNvLinkRemoteDeviceType, type)
int nvmlDeviceGetPciInfo_v3(void *gpu, Pci *to) {
    CHECK(nvmlDeviceGetPciInfo_v3);
    return place(to, ((Gpu *)gpu)->bus);
}
int nvmlDeviceGetCudaComputeCapability(void *gpu, int *major, int *minor) {
    CHECK(nvmlDeviceGetCudaComputeCapability);
    *major = ((Gpu *)gpu)->major, *minor = ((Gpu *)gpu)->minor;
    return 0;
}
int nvmlDeviceGetMigMode(void *gpu, unsigned int *current, unsigned int *pending) {
    CHECK(nvmlDeviceGetMigMode);
    *current = ((Gpu *)gpu)->mig, *pending = 0;
    return 0;
}
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *gpu, unsigned int link, Pci *to) {
    CHECK(nvmlDeviceGetNvLinkRemotePciInfo_v2);
    LINK_OF(gpu, link);
    const char *bus = ((Gpu *)gpu)->links[link].bus;
    REFUSE_IF(!*bus, 3 /* NVML_ERROR_NOT_SUPPORTED */);
    return place(to, bus);
}
int nvmlDeviceGetTopologyCommonAncestor(void *a, void *b, unsigned int *to) {
    CHECK(nvmlDeviceGetTopologyCommonAncestor);
    *to = level[number(a)][number(b)];
    return 0;
}
int nvmlDeviceGetCpuAffinity(void *gpu, unsigned int words, unsigned long *to) {
    CHECK(nvmlDeviceGetCpuAffinity);
    memset(to, 0, words * sizeof *to);
    to[words - 1] = ((Gpu *)gpu)->cpus; // the last CPUs of the mask
    return 0;
}
int nvmlDeviceGetP2PStatus(void *a, void *b, unsigned int index, unsigned int *to) {
    CHECK(nvmlDeviceGetP2PStatus);
    REFUSE_IF(index != 0 /* NVML_P2P_CAPS_INDEX_READ */, 2);
    *to = p2p[number(a)][number(b)];
    return 0;
}
