// DYNAMIC_SHARED(type, name): the shared memory whose size the launch says, as an array of that type. The emulator has
// a definition of its own.
#pragma once

#ifndef DYNAMIC_SHARED
extern __shared__ float4 dynamic_shared_memory[];
#define DYNAMIC_SHARED(type, name) type* const name = reinterpret_cast<type*>(dynamic_shared_memory)
#endif
