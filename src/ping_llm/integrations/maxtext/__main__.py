"""`python -m ping_llm.integrations.maxtext CONFIG key=value…`. Workers import this: nothing heavy at the top."""

import sys

if __name__ == "__main__":
    from ping_llm.integrations.maxtext.launch import main

    sys.exit(main(sys.argv))
