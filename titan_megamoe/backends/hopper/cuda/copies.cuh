// Where a slot's token is: among this rank's, or among copies of the peers' (peer_copies.py), which are in the order of the
// ranks without this one, T_max rows of each.

struct Copies {
    int top_k, own_first, max_tokens;  // K, rank · T_max, T_max

    // Of slot (source · T_max + t) · K + k ≥ 0: t, if this rank is its source, else -2 - its row of the copies.
    DEVICE int place(int slot) const {
        const int row = int(u32(slot) / u32(top_k)), own = row - own_first;
        if (u32(own) < u32(max_tokens)) return own;
        return -2 - (own < 0 ? row : row - max_tokens);
    }
};

// Which row of its matrix a place is.
DEVICE u32 row_of(int place) { return u32(place >= 0 ? place : -2 - place); }
