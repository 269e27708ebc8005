// Work that the blocks of a launch claim in order, each by one thread.
//
// `words`: the next number, and how many blocks are through. Both are 0 before a launch, and the last block that is through
// makes them 0 again: kernels that may run at the same time need their own.

struct Claims {
    u32* words;

    DEVICE u32 next() const { return take_one(words); }
    // After a claim that came too late, which is this block's last.
    DEVICE void done() const {
        if (take_one(words + 1) == gridDim.x - 1) words[0] = words[1] = 0;
    }
};
