from ping_llm.cli import main

if __name__ == "__main__":
    main()
