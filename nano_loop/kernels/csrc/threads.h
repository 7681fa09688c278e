/* torch's threads, on which OpenMP's directives run. */
#pragma once
#ifndef _OPENMP
#error "the compiler ignores the directives of OpenMP: kernels would compute in one thread"
#endif

extern int omp_get_thread_num(void);
extern int omp_get_num_threads(void);
