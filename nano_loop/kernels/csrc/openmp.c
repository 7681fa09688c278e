/* The OpenMP runtime that the functions of this folder call. They run on torch's threads if it is torch's, too. */
#include "threads.h"

extern void omp_set_num_threads(int);
extern int omp_get_max_threads(void);

int max_threads(void) { return omp_get_max_threads(); }
void set_threads(int threads) { omp_set_num_threads(threads); }

/* How many threads a parallel region gets. */
int threads_of_region(int threads) {
    int count = 0;
#pragma omp parallel num_threads(threads)
#pragma omp single
    count = omp_get_num_threads();
    return count;
}
