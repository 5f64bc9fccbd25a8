"""`python -m ping_llm.engines.maxtext CONFIG key=value…`. Worker processes import this: nothing heavy at the top."""

import sys

if __name__ == "__main__":
    from ping_llm.engines.maxtext.launch import main

    sys.exit(main(sys.argv))
