/* Calls functions of nano_loop's C files with the arguments that a file lists, and compares what they write.

   It needs neither Python nor torch. So it runs under an emulator of another processor, and with sanitizers. The file is
   written by recorded_calls.py. Before each call stand its name, the result it returns, and how many threads it takes.
   Lines of arguments follow: numbers, and memory that begins beside the boundary of a vector. */
#include <inttypes.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MOST 24 /* arguments of a call */

/* A number, or memory with `count` elements of `size` bytes: bf16, fp32, or else bytes. What is expected of numbers is in
   double precision, and how far the root of their mean square may be from it. Other memory keeps what it has, but for that of
   the kind 's', in which functions note what they like. */
typedef struct {
    int64_t number, count;
    double real, bound;
    int size;
    char kind;
    unsigned char *base, *memory, *given;
    void *expected;
} Argument;

int batch_norm(const void *, const void *, const float *, const float *, float *, float *, double, double, void *,
               float *, float *, int);
int batch_norm_backward(const void *, const void *, const void *, const float *, const float *, const float *, void *,
                        float *, float *, int);
int group_norm(const void *, int64_t, const void *, const float *, const float *, double, void *, float *, float *, int);
int group_norm_backward(const void *, int64_t, const void *, const void *, const float *, const float *, const float *,
                        void *, float *, float *, int);
void layer_norm(const void *, int64_t, int64_t, int64_t, const float *, const float *, double, void *, float *, float *,
                int);
int layer_norm_backward(const void *, const void *, int64_t, int64_t, int64_t, const float *, const float *,
                        const float *, void *, float *, float *, int);
void fp32_attention_forward(const void *, const float *, const float *, const float *, const float *, const uint8_t *,
                            float *, float *, float *, int);
void fp32_attention_backward(const void *, const float *, const float *, const float *, const float *, const uint8_t *,
                             const float *, const float *, float *, float *, float *, float *, int);
void fp32_product(const void *, const float *, const float *, const float *, float *, int);
int draw_bernoulli(uint64_t *, int64_t, void *, int64_t, int64_t, uint64_t, uint64_t);
#define LOSSES(KIND, TYPE)                                                                                             \
    int cross_entropy_##KIND(const TYPE *, const int64_t *, int64_t, int64_t, int64_t, double, float *, float *,       \
                             float *, int);
#define GRADIENT(KIND, TYPE, OUTPUT)                                                                                   \
    void gradient_##KIND(const TYPE *, const int64_t *, int64_t, int64_t, int64_t, double, const float *,              \
                         const float *, const float *, OUTPUT *, int);
void tanh_forward(const uint16_t *, uint16_t *, int64_t, int);
void gelu_forward(const uint16_t *, uint16_t *, int64_t, int);
void gelu_backward(const uint16_t *, const uint16_t *, uint16_t *, int64_t, int);
LOSSES(float, float)
LOSSES(bf16, uint16_t)
GRADIENT(float_to_float, float, float)
GRADIENT(bf16_to_float, uint16_t, float)
GRADIENT(bf16_to_bf16, uint16_t, uint16_t)
typedef void *Pointer;
#define SIX(TYPE) TYPE, TYPE, TYPE, TYPE, TYPE, TYPE
void recurrence_forward(SIX(Pointer), SIX(Pointer), SIX(Pointer), Pointer, int);
void recurrence_backward(SIX(Pointer), SIX(Pointer), SIX(Pointer), SIX(Pointer), int);

/* Calls a function by its name. Returns what it returns, 0 if that is nothing, and -1 if there is no such function. */
static int call(const char *name, const Argument *arguments, int threads) {
#define P(I) ((void *)arguments[I].memory)
#define N(I) arguments[I].number
#define R(I) arguments[I].real
#define INT(NAME, ...)                                                                                                 \
    if (!strcmp(name, #NAME)) return NAME(__VA_ARGS__);
#define VOID(NAME, ...)                                                                                                \
    if (!strcmp(name, #NAME)) {                                                                                        \
        NAME(__VA_ARGS__);                                                                                             \
        return 0;                                                                                                      \
    }
#define THREE P(0), P(1), P(2)
    INT(batch_norm, THREE, P(3), P(4), P(5), R(6), R(7), P(8), P(9), P(10), threads)
    INT(batch_norm_backward, THREE, P(3), P(4), P(5), P(6), P(7), P(8), threads)
    INT(group_norm, P(0), N(1), P(2), P(3), P(4), R(5), P(6), P(7), P(8), threads)
    INT(group_norm_backward, P(0), N(1), P(2), P(3), P(4), P(5), P(6), P(7), P(8), P(9), threads)
    VOID(layer_norm, P(0), N(1), N(2), N(3), P(4), P(5), R(6), P(7), P(8), P(9), threads)
    INT(layer_norm_backward, P(0), P(1), N(2), N(3), N(4), P(5), P(6), P(7), P(8), P(9), P(10), threads)
    VOID(fp32_attention_forward, THREE, P(3), P(4), P(5), P(6), P(7), P(8), threads)
    VOID(fp32_attention_backward, THREE, P(3), P(4), P(5), P(6), P(7), P(8), P(9), P(10), P(11), threads)
    VOID(fp32_product, P(0), P(1), P(2), P(3), P(4), threads)
    INT(draw_bernoulli, P(0), N(1), P(2), N(3), N(4), (uint64_t)N(5), (uint64_t)N(6))
    INT(cross_entropy_float, P(0), P(1), N(2), N(3), N(4), R(5), P(6), P(7), P(8), threads)
    INT(cross_entropy_bf16, P(0), P(1), N(2), N(3), N(4), R(5), P(6), P(7), P(8), threads)
    VOID(gradient_float_to_float, P(0), P(1), N(2), N(3), N(4), R(5), P(6), P(7), P(8), P(9), threads)
    VOID(gradient_bf16_to_float, P(0), P(1), N(2), N(3), N(4), R(5), P(6), P(7), P(8), P(9), threads)
    VOID(gradient_bf16_to_bf16, P(0), P(1), N(2), N(3), N(4), R(5), P(6), P(7), P(8), P(9), threads)
    VOID(tanh_forward, P(0), P(1), N(2), threads)
    VOID(gelu_forward, P(0), P(1), N(2), threads)
    VOID(gelu_backward, THREE, N(3), threads)
#define SIX_FROM(I) P(I), P(I + 1), P(I + 2), P(I + 3), P(I + 4), P(I + 5)
    VOID(recurrence_forward, SIX_FROM(0), SIX_FROM(6), SIX_FROM(12), P(18), threads)
    VOID(recurrence_backward, SIX_FROM(0), SIX_FROM(6), SIX_FROM(12), SIX_FROM(18), threads)
    return -1;
}

static void *read_bytes(FILE *file, size_t size) {
    void *bytes = malloc(size ? size : 1);
    if (!bytes || fread(bytes, 1, size, file) != size) exit(2);
    return bytes;
}

static Argument read_argument(FILE *file) {
    Argument argument = {0};
    char line[128];
    int has_given, has_expected;
    if (!fgets(line, sizeof line, file)) exit(2);
    if (sscanf(line, "number %" SCNd64, &argument.number) == 1 || sscanf(line, "real %lf", &argument.real) == 1 ||
        !strcmp(line, "null\n"))
        return argument;
    if (sscanf(line, "memory %c %d %" SCNd64 " %lf %d %d", &argument.kind, &argument.size, &argument.count,
               &argument.bound, &has_given, &has_expected) != 6)
        exit(2);
    size_t size = (size_t)argument.count * (size_t)argument.size, beside = argument.kind == 'b' ? 8 : argument.size;
    if (argument.kind == 's') beside = 0;
    argument.base = argument.kind == 's' ? aligned_alloc(64, (size + 63) / 64 * 64) : malloc(beside + size);
    if (!argument.base) exit(2);
    argument.memory = argument.base + beside;
    memset(argument.memory, 0xff, size);
    if (has_given) {
        argument.given = read_bytes(file, size);
        memcpy(argument.memory, argument.given, size);
    }
    if (has_expected) argument.expected = read_bytes(file, argument.kind == 'b' ? size : argument.count * sizeof(double));
    return argument;
}

static double written(const Argument *argument, int64_t place) {
    uint32_t bits = 0;
    float value;
    memcpy(argument->kind == 'h' ? (char *)&bits + 2 : (char *)&bits, argument->memory + place * argument->size,
           argument->size);
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* The root of the mean square of what differs from what is expected: infinite for a number that should be none, a NaN for
   none that should be a number. */
static double error_of(const Argument *argument) {
    const double *expected = argument->expected;
    double squares = 0;
    size_t size = (size_t)argument->count * (size_t)argument->size;
    if (argument->kind == 's') return 0;
    if (argument->kind == 'b' || !expected) {
        const void *bytes = expected ? argument->expected : argument->given;
        return argument->memory && memcmp(argument->memory, bytes, size) ? INFINITY : 0;
    }
    for (int64_t i = 0; i < argument->count; i++) {
        double value = written(argument, i);
        if (isfinite(expected[i])) squares += (value - expected[i]) * (value - expected[i]);
        else if (isnan(expected[i]) ? !isnan(value) : value != expected[i]) return INFINITY;
    }
    return argument->count ? sqrt(squares / (double)argument->count) : 0;
}

int main(int count, char **names) {
    FILE *file = count > 1 ? fopen(names[1], "rb") : 0;
    char line[128], name[64];
    int calls = 0, wrong = 0, length, returned, threads;
    if (!file) return 2;
    for (; fgets(line, sizeof line, file); calls++) {
        Argument arguments[MOST];
        if (sscanf(line, "call %63s %d %d %d", name, &returned, &threads, &length) != 4 || length > MOST) return 2;
        for (int i = 0; i < length; i++) arguments[i] = read_argument(file);
        int got = call(name, arguments, threads);
        if (got != returned) wrong++, printf("call %d, %s: returned %d, not %d\n", calls, name, got, returned);
        for (int i = 0; i < length; i++) {
            double error = error_of(arguments + i);
            if (!(error <= arguments[i].bound))
                wrong++, printf("call %d, %s, argument %d: %g > %g\n", calls, name, i, error, arguments[i].bound);
            free(arguments[i].base), free(arguments[i].given), free(arguments[i].expected);
        }
    }
    fclose(file);
    printf("%d calls, %d wrong\n", calls, wrong);
    return wrong != 0;
}
